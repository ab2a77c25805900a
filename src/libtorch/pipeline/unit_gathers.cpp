#include "libtorch/pipeline/unit_gathers.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

namespace zeroth::libtorch {

std::vector<int> gathers_of_units(const std::vector<Action>& actions, const std::vector<std::vector<int>>& units,
                                  const zeroth::Engine& engine) {
  const ShardingPlan& plan = engine.settings().plan;
  const bool keeps = plan.reshard == Reshard::kStep;
  std::vector<int> gathers(engine.layout().units.size(), 0);
  std::vector<int> kept(gathers.size(), 0);  // by so many chunks
  for (const Action& action : actions) {
    if (action.chunk < 0) continue;
    for (const int unit : units[static_cast<std::size_t>(action.chunk)]) {
      const auto index = static_cast<std::size_t>(unit);
      switch (action.kind) {
        case ActionKind::kUnshard:
          if (keeps && kept[index]++ == 0) ++gathers[index];
          break;
        case ActionKind::kReshard:
          if (keeps) --kept[index];
          break;
        case ActionKind::kBackward:
        case ActionKind::kBackwardInput:
          if (kept[index] == 0 && !keeps_gathered(engine.layout(), plan, unit)) ++gathers[index];
          break;
        default:
          if (kept[index] == 0 && reads_parameters(action.kind)) ++gathers[index];
          break;
      }
    }
  }
  return gathers;
}

int gathers_of_head(const std::vector<Action>& actions, int unit, const zeroth::Engine& engine) {
  const ShardingPlan& plan = engine.settings().plan;
  if (plan.reshard == Reshard::kStep) return 1;
  const bool again = !keeps_gathered(engine.layout(), plan, unit);
  return static_cast<int>(std::ranges::count_if(actions, [again](const Action& one) {
    return one.kind == ActionKind::kVocabScores || (again && one.kind == ActionKind::kVocabGradients);
  }));
}

void require_short_spans(const StepProgram& program) {
  for (const std::vector<Action>& actions : program.actions) {
    std::map<int, int> open;  // of a gathered chunk, its micro-batch; -1: none yet
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kUnshard) open[action.chunk] = -1;
      if (action.kind == ActionKind::kReshard) open.erase(action.chunk);
      if (!reads_parameters(action.kind) || !open.contains(action.chunk)) continue;
      int& first = open[action.chunk];
      if (first < 0) first = action.micro_batch;
      ZR_CHECK(first == action.micro_batch, ErrorCode::kUsage,
               "a program keeps the parameters of a chunk for several micro-batches, and memory is planned for one",
               {.where = "libtorch.pipeline",
                .which = to_text(action),
                .expected = "zeroth.pipeline.unshard=step",
                .got = "unshard=micro_batch, and no RESHARD since micro-batch " + std::to_string(first)});
    }
  }
}

}  // namespace zeroth::libtorch
