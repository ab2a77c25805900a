// DualPipeV: two chunks a rank, placed as a V; in the middle a forward of one chunk stands beside a backward of the
// other, so that an executor may overlap the communication of one with the computation of the other. It takes at least
// 2p micro-batches, and holds the activations of 2p + 1 chunks.
// Ref: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, in the V form that halves its parameters.
#include "program/schedules/v_rank.h"

#include <algorithm>
#include <utility>

namespace zeroth::schedules {
namespace {

std::vector<Action> actions_of(int ranks, int rank, int micro_batches) {
  VRank list(ranks, rank);
  const int after = ranks - rank - 1;  // ranks further down
  for (int i = 0; i < 2 * after; ++i) list.forward(Way::kDown);
  for (int i = 0; i <= rank; ++i) {
    list.forward(Way::kDown);
    list.forward(Way::kUp);
  }
  for (int i = 0; i < after; ++i) {
    list.input(Way::kUp);
    list.weight();
    list.forward(Way::kUp);
  }
  for (int i = 0; i < micro_batches - 2 * ranks + rank + 1; ++i) {
    list.forward(Way::kDown);
    list.backward(Way::kUp);
    list.forward(Way::kUp);
    list.backward(Way::kDown);
  }
  for (int i = 0; i < after; ++i) {
    list.backward(Way::kUp);
    list.forward(Way::kUp);
    list.backward(Way::kDown);
  }
  // The rest has no forward beside it: the second half of the backwards is cut in two.
  for (int i = 0; i < 2 * (rank + 1); ++i) {
    const Way way = i % 2 == 0 ? Way::kUp : Way::kDown;
    if (i <= rank) {
      list.backward(way);
    } else {
      list.input(way);
    }
  }
  for (int i = 0; i < after; ++i) {
    list.weight();
    list.input(Way::kDown);
  }
  list.all_weights();
  return list.take();
}

}  // namespace

StepProgram dual_pipe_v(const ScheduleOptions& options) {
  StepProgram program = placed_as_v("dualpipev", options);
  const int enough = std::max(options.micro_batches, 2 * options.ranks);
  for (int rank = 0; rank < options.ranks; ++rank)
    program.actions[static_cast<std::size_t>(rank)] = actions_of(options.ranks, rank, enough);
  return keep_micro_batches(std::move(program), options.micro_batches);
}

ScheduleFormula dual_pipe_v_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const bool enough = options.micro_batches >= 2 * options.ranks;
  const int held = std::min(2 * options.micro_batches, 2 * options.ranks + 1);
  ScheduleFormula formula{.bubble_text = "(p-1)F if F = I = W and m >= 2p",
                          .in_flight = on_every_rank(options, held),
                          .in_flight_is_exact = enough};
  if (enough && are_equal(times)) formula.bubble = (options.ranks - 1) * times.forward;
  return formula;
}

}  // namespace zeroth::schedules
