#include "program/structure.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

bool brings_gradients(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

/// What a rank does in one step of `steps` and those after them, in which what is late comes.
class OneStep {
 public:
  OneStep(const StepProgram& program, int step, int steps) : program_(program), step_(step), steps_(steps) {}

  /// -1: of a step that there is not.
  [[nodiscard]] int batch_of(const Action& action) const {
    const int batch = step_ - program_.lateness(action);
    return batch < steps_ ? batch : -1;
  }

  void append(const std::vector<Action>& actions, std::vector<Action>& result) const {
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kReduce && !has_gradients(actions, action.chunk)) continue;
      Action moved = action;
      if (action.micro_batch >= 0) {
        const int batch = batch_of(action);
        if (batch < 0) continue;
        moved.micro_batch += batch * program_.micro_batches;
      }
      result.push_back(moved);
    }
  }

 private:
  [[nodiscard]] bool has_gradients(const std::vector<Action>& actions, int chunk) const {
    return std::ranges::any_of(actions, [&](const Action& action) {
      return action.chunk == chunk && brings_gradients(action.kind) && batch_of(action) >= 0;
    });
  }

  const StepProgram& program_;
  int step_;
  int steps_;
};

}  // namespace

StepProgram unrolled(const StepProgram& program, int steps) {
  if (program.late.empty()) return program;
  require_structure(program, "unrolled");
  ZR_CHECK(steps >= 1 && steps <= kMostActions / program.micro_batches, ErrorCode::kUsage,
           "a program cannot be unrolled for so many steps",
           {.where = "program.unrolled",
            .which = program.schedule,
            .expected = "1 or more, and few enough that "
                        "micro-batches can be numbered",
            .got = std::to_string(steps)});
  StepProgram result{.schedule = program.schedule,
                     .micro_batches = program.micro_batches * steps,
                     .rank_of_chunk = program.rank_of_chunk,
                     .inexact = true};
  for (const std::vector<Action>& actions : program.actions) {
    std::vector<Action> all;
    for (int step = 0; step < steps + program.most_late(); ++step) OneStep(program, step, steps).append(actions, all);
    result.actions.push_back(std::move(all));
  }
  return result;
}

}  // namespace zeroth
