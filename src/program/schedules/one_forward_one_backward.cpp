// Rank i starts with p - i - 1 forwards; then a forward and a backward in turn; then the backwards that are left. So it
// holds the activations of at most p - i micro-batches. Ref: Narayanan et al., "PipeDream-Flush" in "Memory-Efficient
// Pipeline-Parallel DNN Training", ICML 2021.
#include "program/schedules/table.h"

#include <algorithm>

namespace zeroth::schedules {

StepProgram one_forward_one_backward(const ScheduleOptions& options) {
  StepProgram program = placed_round("1f1b", options);
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const int ahead = std::min(options.ranks - rank - 1, options.micro_batches);
    const auto add = [&](ActionKind kind, int m) {
      actions.push_back({.kind = kind, .chunk = rank, .micro_batch = m});
    };
    for (int m = 0; m < ahead; ++m) add(ActionKind::kForward, m);
    for (int m = 0; m < options.micro_batches; ++m) {
      if (m + ahead < options.micro_batches) add(ActionKind::kForward, m + ahead);
      add(ActionKind::kBackward, m);
    }
  }
  return program;
}

ScheduleFormula one_forward_one_backward_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  ScheduleFormula formula{.bubble = (options.ranks - 1) * (times.forward + times.input + times.weight),
                          .bubble_text = "(p-1)(F+I+W)",
                          .in_flight_is_exact = true};
  for (int rank = 0; rank < options.ranks; ++rank)
    formula.in_flight.push_back(std::min(options.micro_batches, options.ranks - rank));
  return formula;
}

}  // namespace zeroth::schedules
