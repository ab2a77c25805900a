// Ouroboros: gradients that are late by p - r - 1 steps on rank r, so that no rank waits for a backward. A step is one
// micro-batch; the ranks run through all of them in 1F1B order, and each steps by itself after every backward: only the
// first and the last steps of the whole have waits. It trains with gradients of older parameters: inexact.
// Ref: Yang et al., "Ouroboros: On Accelerating Training of Transformer-Based Language Models", NeurIPS 2019,
// section 3.
#include "program/schedules/table.h"

#include <utility>

namespace zeroth::schedules {

StepProgram ouroboros(const ScheduleOptions& options) {
  StepProgram program = one_forward_one_backward(options);
  program.schedule = "ouroboros";
  program.inexact = true;
  for (std::vector<Action>& actions : program.actions) {
    std::vector<Action> stepped;
    for (const Action& action : actions) {
      stepped.push_back(action);
      if (action.kind != ActionKind::kBackward) continue;
      stepped.push_back({.kind = ActionKind::kReduce, .chunk = action.chunk});
      stepped.push_back({.kind = ActionKind::kStep});
    }
    actions = std::move(stepped);
  }
  return program;
}

ScheduleFormula ouroboros_formula(const ScheduleOptions& options, const ChunkTimes& times) {
  ScheduleFormula formula = one_forward_one_backward_formula(options, times);
  formula.bubble_text = "(p-1)(F+I+W) of all steps together";
  return formula;
}

}  // namespace zeroth::schedules
