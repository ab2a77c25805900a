#include "libtorch/pipeline/unit_gathers.h"

#include <zeroth/base/error.h>
#include <zeroth/libtorch/pipeline.h>
#include <zeroth/zero/memory_plan.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>

namespace zeroth::libtorch {

namespace {

/// Where an action stands that the head's unit is kept from, or to; -1: nowhere.
std::ptrdiff_t place_of(const std::vector<Action>& actions, ActionKind kind, bool last) {
  std::ptrdiff_t found = -1;
  for (std::size_t at = 0; at < actions.size(); ++at) {
    if (actions[at].kind == kind && (last || found < 0)) found = static_cast<std::ptrdiff_t>(at);
  }
  return found;
}

bool looks_up(const PipelineOptions& options, int chunk, int unit) {
  if (options.tables.empty()) return false;
  const std::vector<int>& tables = options.tables.at(static_cast<std::size_t>(chunk));
  return std::ranges::find(tables, unit) != tables.end();
}

}  // namespace

std::vector<int> gathers_of_units(const std::vector<Action>& actions, const PipelineOptions& options,
                                  const zeroth::Engine& engine) {
  const int head = options.head ? options.head->unit : -1;
  const ShardingPlan& plan = engine.settings().plan;
  const bool keeps = plan.reshard == Reshard::kStep;
  std::vector<int> gathers(engine.layout().units.size(), 0);
  std::vector<int> kept(gathers.size(), 0);  // by so many chunks, and the head
  const std::ptrdiff_t head_from = place_of(actions, ActionKind::kVocabScores, /*last=*/false);
  const std::ptrdiff_t head_to = place_of(actions, ActionKind::kVocabGradients, /*last=*/true);
  for (std::size_t at = 0; at < actions.size(); ++at) {
    const Action& action = actions[at];
    if (action.chunk < 0) {
      if (head < 0) continue;
      const auto index = static_cast<std::size_t>(head);
      const bool again = action.kind == ActionKind::kVocabGradients && !keeps_gathered(engine.layout(), plan, head);
      if (keeps) {
        if (static_cast<std::ptrdiff_t>(at) == head_from && kept[index]++ == 0) ++gathers[index];
        if (static_cast<std::ptrdiff_t>(at) == head_to) --kept[index];
      } else if (action.kind == ActionKind::kVocabScores || again) {
        ++gathers[index];
      }
      continue;
    }
    for (const int unit : options.units[static_cast<std::size_t>(action.chunk)]) {
      const auto index = static_cast<std::size_t>(unit);
      switch (action.kind) {
        case ActionKind::kUnshard:
          if (keeps && kept[index]++ == 0) ++gathers[index];
          break;
        case ActionKind::kReshard:
          if (keeps) --kept[index];
          break;
        case ActionKind::kBackwardInput:
          if (looks_up(options, action.chunk, unit)) break;
          [[fallthrough]];
        case ActionKind::kBackward:
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
