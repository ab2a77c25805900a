// All forwards, then all backwards. Ref: Huang et al., "GPipe", NeurIPS 2019, section 2.2 and figure 2c.
#include "program/schedules/table.h"

namespace zeroth::schedules {

StepProgram gpipe(const ScheduleOptions& options) {
  StepProgram program = placed_round("gpipe", options);
  for (int rank = 0; rank < options.ranks; ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    for (const ActionKind kind : {ActionKind::kForward, ActionKind::kBackward}) {
      for (int m = 0; m < options.micro_batches; ++m)
        actions.push_back({.kind = kind, .chunk = rank, .micro_batch = m});
    }
  }
  return program;
}

ScheduleFormula gpipe_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  return {.bubble = (options.ranks - 1) * (times.forward + times.input + times.weight),
          .bubble_text = "(p-1)(F+I+W)",
          .in_flight = on_every_rank(options, options.micro_batches),
          .in_flight_is_exact = true};
}

}  // namespace zeroth::schedules
