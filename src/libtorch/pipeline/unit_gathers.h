// How often a rank's part of a program gathers each unit of an engine.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/program/step_program.h>

#include <vector>

namespace zeroth::libtorch {

/// Of a step, one number a unit, for Engine::steer(). `units`: as PipelineOptions::units. Units that the plan keeps
/// (Reshard::kStep) stay from UNSHARD to RESHARD; else every F, B, I and RECOMPUTE gathers those of its chunk, one
/// after the other. W reads no parameters.
[[nodiscard]] std::vector<int> gathers_of_units(const std::vector<Action>& actions,
                                                const std::vector<std::vector<int>>& units,
                                                const zeroth::Engine& engine);
/// The same of the unit with this stage's rows of a shared head: V_S and V_T gather it, or the first V_S of a step.
[[nodiscard]] int gathers_of_head(const std::vector<Action>& actions, int unit, const zeroth::Engine& engine);

}  // namespace zeroth::libtorch
