// ZB-V: two chunks a rank, placed as a V, and no more activations than 1F1B. If F, I and W of a chunk take the same
// time, no rank waits from its first computation to its last one; that takes at least 2p - 1 micro-batches.
// Ref: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, and the V schedule of "Zero Bubble
// Pipeline Parallelism", ICLR 2024, section 4.
#include "program/schedules/v_rank.h"

#include <algorithm>
#include <utility>

namespace zeroth::schedules {
namespace {

std::vector<Action> actions_of(int ranks, int rank, int micro_batches) {
  VRank list(ranks, rank);
  // Until the first micro-batch comes back up, then until its gradient comes down.
  for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) list.forward(Way::kDown);
  for (int i = 0; i < rank; ++i) {
    list.forward(Way::kUp);
    list.forward(Way::kDown);
  }
  // Until the first gradient comes up: what is held stays 2p - 1 or 2p from here on.
  for (int i = 0; i < ranks - rank; ++i) {
    list.forward(Way::kUp);
    list.input(Way::kUp);
    list.weight();
  }
  while (list.forwards(Way::kUp) < micro_batches) {
    if (list.forwards(Way::kDown) < micro_batches) list.forward(Way::kDown);
    list.input(Way::kDown);
    list.weight();
    list.forward(Way::kUp);
    list.input(Way::kUp);
    list.weight();
  }
  // Gradients go on first; the W that are left fill what would be waited.
  for (int i = 0; i < rank; ++i) {
    list.input(Way::kDown);
    list.input(Way::kUp);
  }
  while (list.backwards(Way::kDown) < micro_batches) {
    list.input(Way::kDown);
    list.weight();
  }
  list.all_weights();
  return list.take();
}

}  // namespace

StepProgram zb_v(const ScheduleOptions& options) {
  StepProgram program = placed_as_v("zb-v", options);
  const int enough = std::max(options.micro_batches, 2 * options.ranks - 1);
  for (int rank = 0; rank < options.ranks; ++rank)
    program.actions[static_cast<std::size_t>(rank)] = actions_of(options.ranks, rank, enough);
  return keep_micro_batches(std::move(program), options.micro_batches);
}

ScheduleFormula zb_v_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const bool enough = options.micro_batches >= 2 * options.ranks - 1;
  ScheduleFormula formula{.bubble_text = "0 if F = I = W and m >= 2p - 1",
                          .in_flight = on_every_rank(options, 2 * std::min(options.micro_batches, options.ranks)),
                          .in_flight_is_exact = enough};
  if (enough && are_equal(times)) formula.bubble = 0;
  return formula;
}

}  // namespace zeroth::schedules
