// Ouroboros: no rank waits for a backward. In step t rank r of p runs the forwards of the step's own micro-batches, and
// backwards of those of step t - late, with the gradients that rank r + 1 gave for them in step t - 1.
//
// How late. The last rank has its gradient in the step of its forward: late = 0. What it sends in step t is there at
// rank p - 2 for step t + 1, and one step later at each rank before: late(r) = late(r + 1) + 1 = p - 1 - r. So rank r
// has nothing to do backwards in its first p - 1 - r steps. Forwards are not late: the micro-batches of a step go
// through all ranks in this step, so that the loss of a step is that of its own micro-batches.
//
// Which weights. Each rank updates in each step, so its weights are others in step t than in step t - late. Nobody has
// those of then any more: a late rank keeps the inputs of its chunk, and RECOMPUTE runs the forward again, with the
// weights of now, directly before the backward. With x the input that was kept, f the chunk's function, w its weights
// and g what rank r + 1 sent in the step before:
//     gradient of the weights  (df/dw)(x, w_now)^T g        what is sent on  (df/dx)(x, w_now)^T g
//
// Order. The last rank begins when the first forward has come through the others; its RECOMPUTEs, which it does not
// need, are the time in which it makes up for that. Rank r does r late backwards first, while the forwards come to it;
// then all forwards, which the last rank waits for; then the other backwards.
// Ref: Yang et al., "Ouroboros: On Accelerating Training of Transformer-Based Language Models", NeurIPS 2019, section
// 3, which takes the weights of then. Ref: Huo et al., "Training Neural Networks Using Features Replay", NeurIPS 2018,
// which takes those of now.
#include "program/schedules/table.h"

#include <algorithm>
#include <cstddef>

namespace zeroth::schedules {

StepProgram ouroboros(const ScheduleOptions& options) {
  StepProgram program = placed_round("ouroboros", options);
  program.inexact = true;
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const int late = options.ranks - 1 - rank;
    program.late.push_back(late);
    const auto add = [&](ActionKind kind, int begin, int end) {
      for (int m = begin; m < end; ++m) actions.push_back({.kind = kind, .chunk = rank, .micro_batch = m});
    };
    if (late == 0) {
      for (int m = 0; m < options.micro_batches; ++m) {
        add(ActionKind::kForward, m, m + 1);
        add(ActionKind::kBackward, m, m + 1);
      }
      continue;
    }
    const int before = std::min(rank, options.micro_batches);
    add(ActionKind::kBackward, 0, before);
    add(ActionKind::kForward, 0, options.micro_batches);
    add(ActionKind::kBackward, before, options.micro_batches);
  }
  return program;
}

ScheduleFormula ouroboros_formula(const ScheduleOptions& options, const ChunkTimes& /*times*/) {
  ScheduleFormula formula{.bubble_text = "(p-1)F a step on the last rank, which computes M F less than the others",
                          .in_flight_is_exact = true};
  for (int rank = 0; rank < options.ranks; ++rank) {
    const int late = options.ranks - 1 - rank;
    const int all = (late + 1) * options.micro_batches - std::min(rank, options.micro_batches);
    formula.in_flight.push_back(late == 0 ? 1 : all);
  }
  return formula;
}

}  // namespace zeroth::schedules
