// How often a rank's part of a program gathers each unit of an engine.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/program/step_program.h>

#include <vector>

namespace zeroth::libtorch {

/// Of a step, one number a unit, for Engine::steer(). Units that the plan keeps (Reshard::kStep) stay from UNSHARD to
/// RESHARD, and that of a shared head from the first V_S to the last V_T; else every F, B, I and RECOMPUTE gathers
/// those of its chunk, one after the other, and V_S and V_T that of the head. W reads no parameters, and I no tables.
[[nodiscard]] std::vector<int> gathers_of_units(const std::vector<Action>& actions, const PipelineOptions& options,
                                                const zeroth::Engine& engine);

}  // namespace zeroth::libtorch
