// 1F1B over v chunks a rank, placed round: groups of p micro-batches go through all chunks of a rank in turn. Ref:
// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section
// 2.2. The paper needs a number of micro-batches that p divides; here the last group may be incomplete, which makes its
// turn shorter for some ranks only, and the bubble larger.
#include "program/schedules/table.h"

#include <algorithm>

namespace zeroth::schedules {
namespace {

struct Turn {
  int chunk;
  int micro_batch;
};

/// The `index`-th forward of a rank; its backwards go through the chunks in the reverse order.
Turn turn_of(const ScheduleOptions& options, int rank, int index, bool backward) {
  const int group = index / (options.ranks * options.chunks_per_rank);
  const int in_group = index % (options.ranks * options.chunks_per_rank);
  const int own = in_group / options.ranks;
  const int chunk = backward ? options.chunks_per_rank - 1 - own : own;
  return {.chunk = chunk * options.ranks + rank, .micro_batch = group * options.ranks + in_group % options.ranks};
}

/// Forwards before the first backward of a rank, less one.
int ahead_of(const ScheduleOptions& options, int rank) {
  const int hops = options.ranks - rank - 1;
  return options.chunks_per_rank == 1 ? hops : 2 * hops + (options.chunks_per_rank - 1) * options.ranks;
}

}  // namespace

StepProgram interleaved(const ScheduleOptions& options) {
  StepProgram program = placed_round("interleaved", options);
  const int groups = (options.micro_batches + options.ranks - 1) / options.ranks;
  const int turns = groups * options.ranks * options.chunks_per_rank;
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const auto add = [&](ActionKind kind, int index) {
      const Turn turn = turn_of(options, rank, index, kind == ActionKind::kBackward);
      actions.push_back({.kind = kind, .chunk = turn.chunk, .micro_batch = turn.micro_batch});
    };
    const int ahead = std::min(turns, ahead_of(options, rank));
    for (int index = 0; index < ahead; ++index) add(ActionKind::kForward, index);
    for (int index = 0; index < turns; ++index) {
      if (index + ahead < turns) add(ActionKind::kForward, index + ahead);
      add(ActionKind::kBackward, index);
    }
  }
  return keep_micro_batches(std::move(program), options.micro_batches);
}

ScheduleFormula interleaved_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const bool whole = options.micro_batches % options.ranks == 0 || options.chunks_per_rank == 1;
  ScheduleFormula formula{.bubble_text = "(p-1)(F+I+W), of a chunk", .in_flight_is_exact = whole};
  if (whole) formula.bubble = (options.ranks - 1) * (times.forward + times.input + times.weight);
  for (int rank = 0; rank < options.ranks; ++rank)
    formula.in_flight.push_back(std::min(options.micro_batches * options.chunks_per_rank, ahead_of(options, rank) + 1));
  return formula;
}

}  // namespace zeroth::schedules
