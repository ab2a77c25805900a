// Passes: functions from a program to a program that has more actions. Each is pure and looks at nothing but its
// program.
//
//   schedule                 0F0 0F1 0B0 0B1
//   add_messages             0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//   add_recompute            ... 0RECOMPUTE0 0RECV_B0 0B0 ...
//   add_activation_offload   0F0 0SEND_F0 0FLUSH0 ... 0FETCH0 ... 0B0
//   add_unshards             0UNSHARD 0F0 0SEND_F0 0RESHARD ...
//   add_reduces              ... 0B1 0REDUCE
//   add_step                 ... 0REDUCE STEP
//   add_state_offload        ... 0REDUCE 0FETCH STEP 0FLUSH
//
// They go in this order; lower() does them all. All of them throw kUsage for a program that already has what they add,
// and for one whose actions are not in range.
#pragma once

#include <zeroth/program/step_program.h>

#include <vector>

namespace zeroth {

/// When the parameters of a chunk are gathered, if they are sharded (ZeRO stage 3).
enum class Gathers {
  kNone,           ///< the parameters are whole all the time
  kPerMicroBatch,  ///< around every computation but W; those of one micro-batch that follow each other share a gather
  kKept,           ///< once, before the first computation of the chunk; given back after the last one
};

/// Steps of a program with late gradients one after the other, with micro-batches numbered through; the backwards that
/// are missing then follow, in as many steps without forwards as the latest one needs. Other programs as they are.
/// Throws kUsage for a structure that is not valid, and for more micro-batches than can be numbered.
[[nodiscard]] StepProgram unrolled(const StepProgram& program, int steps);

/// A send right after its computation, a receive right before its use; nothing between chunks of the same rank. Where
/// two messages from one rank to another are used in another order than they are sent, the one that is sent first is
/// received with the other: receives are always in the order of the sends. Gradients that a chunk uses a step later are
/// received at the end of the step.
[[nodiscard]] StepProgram add_messages(StepProgram program);

/// RECOMPUTE before B or I, and before the receive of its gradient: it fills a wait. Not where B or I follows its F
/// directly on its rank. `chunks` says which chunks recompute; empty: all. A chunk whose gradients are late always
/// does: its weights have changed since its F.
[[nodiscard]] StepProgram add_recompute(StepProgram program, const std::vector<bool>& chunks = {});

/// FLUSH after F, FETCH before the first use in the backward; for pairs of chunk and micro-batch that rest for at least
/// one computation of their rank in between. So many computations as `ahead` says lie between a FETCH and the use,
/// where there are so many.
[[nodiscard]] StepProgram add_activation_offload(StepProgram program, int ahead = 1);

[[nodiscard]] StepProgram add_unshards(StepProgram program, Gathers gathers);
/// REDUCE after the last B or W of each chunk.
[[nodiscard]] StepProgram add_reduces(StepProgram program);
/// STEP at the end of every rank.
[[nodiscard]] StepProgram add_step(StepProgram program);

/// FETCH of every chunk before each STEP, FLUSH after it; the program must have STEP.
[[nodiscard]] StepProgram add_state_offload(StepProgram program);

/// Forwards without their backwards: what an evaluation runs. Actions other than F and its messages go.
[[nodiscard]] StepProgram only_forwards(StepProgram program);

enum class Vocabulary {
  kNone,
  kTwoBarriers,  ///< V_T gives the gradients of input and weights, V_GRAD sums those of the input
  kOneBarrier,   ///< V_S gives the gradient of the input too, up to factors that V_SUM brings; V_T may come late
};

/// Splits the output layer, which else is the work of the last chunk, over all ranks: V_INPUT, V_S, V_SUM, V_T and
/// perhaps V_GRAD of every micro-batch. For a schedule: the program has computations alone.
///
/// So that ranks need not wait for the layer, all backwards come later than before: behind as many more forwards of
/// their rank as there are barriers, and at least one of each of its chunks. A rank holds so many more pairs: of 1F1B
/// p + 2 or p + 1 micro-batches. The parts of the layer stand where they are ready first, if F, I, W, V_S and V_T take
/// the same time. Throws kUsage for a schedule in which ranks would wait for each other.
/// Ref: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys 2025, algorithms 1 and 2.
[[nodiscard]] StepProgram add_vocabulary(StepProgram program, Vocabulary vocabulary);

struct LowerOptions {
  Gathers gathers = Gathers::kNone;
  bool step = true;  ///< REDUCE and STEP; false for a program of forwards alone
  bool recompute = false;
  bool offload_activations = false;
  bool offload_states = false;  ///< needs step
  Vocabulary vocabulary = Vocabulary::kNone;
};

/// A schedule with all that a rank needs to run it. A program of several steps has its own REDUCE and STEP: the options
/// that would add them add none.
[[nodiscard]] StepProgram lower(StepProgram program, const LowerOptions& options = {});

}  // namespace zeroth
