// ZB-H1 and ZB-H2: 1F1B with the backward cut in two. I goes on to the rank before at once; W fills the time in which
// the rank would wait. Rank i starts with a number of forwards, and keeps a number of I without their W: together they
// are the micro-batches that it holds, p on every rank (H1) or 2p - 1 (H2).
// Ref: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
#include "program/schedules/table.h"

#include <algorithm>

namespace zeroth::schedules {
namespace {

std::vector<Action> actions_of(int chunk, int micro_batches, int ahead, int kept) {
  std::vector<Action> actions;
  int forwards = 0;
  int weights = 0;
  const auto add = [&](ActionKind kind, int m) { actions.push_back({.kind = kind, .chunk = chunk, .micro_batch = m}); };
  while (forwards < std::min(ahead, micro_batches)) add(ActionKind::kForward, forwards++);
  for (int m = 0; m < micro_batches; ++m) {
    add(ActionKind::kBackwardInput, m);
    if (m + 1 - weights > kept) add(ActionKind::kBackwardWeight, weights++);
    if (forwards < micro_batches) add(ActionKind::kForward, forwards++);
  }
  while (weights < micro_batches) add(ActionKind::kBackwardWeight, weights++);
  return actions;
}

}  // namespace

StepProgram zb_h1(const ScheduleOptions& options) {
  StepProgram program = placed_round("zb-h1", options);
  for (int rank = 0; rank < options.ranks; ++rank) {
    program.actions[static_cast<std::size_t>(rank)] =
        actions_of(rank, options.micro_batches, options.ranks - rank, rank);
  }
  return program;
}

StepProgram zb_h2(const ScheduleOptions& options) {
  StepProgram program = placed_round("zb-h2", options);
  for (int rank = 0; rank < options.ranks; ++rank) {
    program.actions[static_cast<std::size_t>(rank)] =
        actions_of(rank, options.micro_batches, 2 * (options.ranks - rank) - 1, 2 * rank);
  }
  return program;
}

ScheduleFormula zb_h1_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const int hidden = std::min(options.micro_batches, options.ranks) - 1;  // W in the place of what is waited
  ScheduleFormula formula{.bubble_text = "(p-1)(F+I-W)",
                          .in_flight = on_every_rank(options, std::min(options.micro_batches, options.ranks)),
                          .in_flight_is_exact = true};
  if (times.weight <= times.forward)
    formula.bubble = (options.ranks - 1) * (times.forward + times.input) - hidden * times.weight;
  return formula;
}

ScheduleFormula zb_h2_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  const int held = std::min(options.micro_batches, 2 * options.ranks - 1);
  ScheduleFormula formula{
      .bubble_text = "(p-1)(F+I-2W)", .in_flight = on_every_rank(options, held), .in_flight_is_exact = true};
  if (times.weight <= std::min(times.forward, times.input))
    formula.bubble = (options.ranks - 1) * (times.forward + times.input) - (held - 1) * times.weight;
  return formula;
}

}  // namespace zeroth::schedules
