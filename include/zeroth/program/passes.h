// Passes: functions from a program to a program that has more actions. Each is pure and looks at nothing but its
// program.
//
//   schedule        0F0 0F1 0B0 0B1
//   add_messages    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//   add_unshards    0UNSHARD 0F0 0SEND_F0 0RESHARD ...
//   add_reduces     ... 0B1 0REDUCE
//   add_step        ... 0REDUCE STEP
//
// All of them throw kUsage for a program that already has what they add, and for one whose actions are not in range.
#pragma once

#include <zeroth/program/step_program.h>

namespace zeroth {

/// When the parameters of a chunk are gathered, if they are sharded (ZeRO stage 3).
enum class Gathers {
  kNone,           ///< the parameters are whole all the time
  kPerMicroBatch,  ///< around every computation; those of one micro-batch that follow each other share a gather
  kKept,           ///< once, before the first computation of the chunk; given back after the last one
};

/// A send right after its computation, a receive right before its use; nothing between chunks of the same rank. Where
/// two messages from one rank to another are used in another order than they are sent, the one that is sent first is
/// received with the other: receives are always in the order of the sends.
[[nodiscard]] StepProgram add_messages(StepProgram program);
[[nodiscard]] StepProgram add_unshards(StepProgram program, Gathers gathers);
/// REDUCE after the last B or W of each chunk.
[[nodiscard]] StepProgram add_reduces(StepProgram program);
/// STEP at the end of every rank.
[[nodiscard]] StepProgram add_step(StepProgram program);

/// Forwards without their backwards: what an evaluation runs. Actions other than F and its messages go.
[[nodiscard]] StepProgram only_forwards(StepProgram program);

struct LowerOptions {
  Gathers gathers = Gathers::kNone;
  bool step = true;  ///< REDUCE and STEP; false for a program of forwards alone
};

/// A schedule with all that a rank needs to run it.
[[nodiscard]] StepProgram lower(StepProgram program, const LowerOptions& options = {});

}  // namespace zeroth
