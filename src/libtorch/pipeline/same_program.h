// That all stages run one program.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/program/step_program.h>

namespace zeroth::libtorch {

/// Collective over the stages, blocks. Throws kMismatch on all of them with the stage that has another program than
/// most, and the first thing that differs: schedule, micro-batches, chunks, an action of some stage.
void require_same_program(const StepProgram& program, const Communicator& stages);

}  // namespace zeroth::libtorch
