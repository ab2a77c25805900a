// How often a rank's part of a program gathers each unit of an engine.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/program/step_program.h>

#include <vector>

namespace zeroth::libtorch {

/// Of a step, one number a unit, for Engine::steer(). `units`: as PipelineOptions::units. `head`: the unit with this
/// stage's rows of a shared head; -1: none. Units that the plan keeps (Reshard::kStep) stay from UNSHARD to RESHARD,
/// and that of the head from the first V_S to the last V_T; else every F, B, I and RECOMPUTE gathers those of its
/// chunk, one after the other, and V_S and V_T that of the head. W reads no parameters.
[[nodiscard]] std::vector<int> gathers_of_units(const std::vector<Action>& actions,
                                                const std::vector<std::vector<int>>& units, int head,
                                                const zeroth::Engine& engine);

}  // namespace zeroth::libtorch
