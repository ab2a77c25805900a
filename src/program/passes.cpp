#include "program/passes_common.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace zeroth {
namespace {

/// Where actions that come before the last action of `list` begin: its receives of the same chunk belong to it.
std::size_t begin_of_last(const std::vector<Action>& list) {
  std::size_t begin = list.size() - 1;
  while (begin > 0 && is_message(list[begin - 1].kind) && !is_send(list[begin - 1].kind)) --begin;
  return begin;
}

std::vector<Action> gather_around_each(const std::vector<Action>& actions) {
  std::vector<Action> result;
  Action open;  // the computation that has its parameters; of no chunk if none has
  const auto close = [&] {
    if (open.chunk >= 0) result.push_back({.kind = ActionKind::kReshard, .chunk = open.chunk});
    open = {};
  };
  for (const Action& action : actions) {
    const bool same = action.chunk == open.chunk && action.micro_batch == open.micro_batch;
    const bool belongs = same || (is_send(action.kind) && action.chunk == open.chunk);
    if (!belongs) close();
    result.push_back(action);
    if (!reads_parameters(action.kind) || same) continue;
    open = action;
    result.insert(result.begin() + static_cast<std::ptrdiff_t>(begin_of_last(result)),
                  {.kind = ActionKind::kUnshard, .chunk = action.chunk});
  }
  close();
  return result;
}

std::vector<Action> gather_once(const std::vector<Action>& actions, const std::vector<int>& own_chunks) {
  std::vector<Action> result = actions;
  for (const int chunk : own_chunks) {
    const auto uses = [&](const Action& action) { return reads_parameters(action.kind) && action.chunk == chunk; };
    const auto last = std::ranges::find_if(result.rbegin(), result.rend(), uses);
    if (last == result.rend()) continue;
    auto end = last.base();
    while (end != result.end() && is_send(end->kind) && end->chunk == chunk) ++end;
    result.insert(end, {.kind = ActionKind::kReshard, .chunk = chunk});
    const auto first = std::ranges::find_if(result, uses);
    const std::vector<Action> until(result.begin(), first + 1);
    result.insert(result.begin() + static_cast<std::ptrdiff_t>(begin_of_last(until)),
                  {.kind = ActionKind::kUnshard, .chunk = chunk});
  }
  return result;
}

}  // namespace

void require_none(const StepProgram& program, const char* pass, bool (*is_it)(const Action&)) {
  require_structure(program, pass);
  for (std::size_t rank = 0; rank < program.actions.size(); ++rank) {
    for (const Action& action : program.actions[rank]) {
      ZR_CHECK(!is_it(action), ErrorCode::kUsage, "the program already has what this pass adds",
               {.where = std::string("program.") + pass,
                .who = "rank " + std::to_string(rank),
                .which = program.schedule,
                .got = to_text(action)});
    }
  }
}

StepProgram add_unshards(StepProgram program, Gathers gathers) {
  require_none(program, "add_unshards", [](const Action& action) {
    return action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard;
  });
  if (gathers == Gathers::kNone) return program;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    actions = gathers == Gathers::kKept ? gather_once(actions, program.chunks_of(rank)) : gather_around_each(actions);
  }
  return program;
}

StepProgram add_reduces(StepProgram program) {
  require_none(program, "add_reduces", [](const Action& action) { return action.kind == ActionKind::kReduce; });
  for (int rank = 0; rank < program.ranks(); ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    for (const int chunk : program.chunks_of(rank)) {
      const auto last = std::ranges::find_if(actions.rbegin(), actions.rend(), [&](const Action& action) {
        return action.chunk == chunk &&
               (action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight);
      });
      ZR_CHECK(last != actions.rend(), ErrorCode::kUsage, "a chunk without a backward has nothing to reduce",
               {.where = "program.add_reduces",
                .who = "rank " + std::to_string(rank),
                .which = "chunk " + std::to_string(chunk)});
      // After what belongs to the backward: the send of its result, and the end of its gather.
      auto place = last.base();
      while (place != actions.end() && place->chunk == chunk &&
             (place->kind == ActionKind::kSendBackward || place->kind == ActionKind::kReshard))
        ++place;
      actions.insert(place, {.kind = ActionKind::kReduce, .chunk = chunk});
    }
  }
  return program;
}

StepProgram add_step(StepProgram program) {
  require_none(program, "add_step", [](const Action& action) { return action.kind == ActionKind::kStep; });
  for (std::vector<Action>& actions : program.actions) actions.push_back({.kind = ActionKind::kStep});
  return program;
}

StepProgram only_forwards(StepProgram program) {
  require_structure(program, "only_forwards");
  program.late.clear();
  for (std::vector<Action>& actions : program.actions) {
    std::erase_if(actions, [](const Action& action) {
      return action.kind != ActionKind::kForward && action.kind != ActionKind::kSendForward &&
             action.kind != ActionKind::kRecvForward;
    });
  }
  return program;
}

StepProgram lower(StepProgram program, const LowerOptions& options) {
  if (options.vocabulary != Vocabulary::kNone) program = add_vocabulary(std::move(program), options.vocabulary);
  program = add_messages(std::move(program));
  if (options.recompute || program.most_late() > 0) {
    const std::vector<bool> late_alone(options.recompute ? 0 : program.rank_of_chunk.size(), false);
    program = add_recompute(std::move(program), late_alone);
  }
  if (options.offload_activations) program = add_activation_offload(std::move(program));
  program = add_unshards(std::move(program), options.gathers);
  if (options.step && (!program.inexact || !program.late.empty())) program = add_step(add_reduces(std::move(program)));
  if (!options.offload_states) return program;
  return add_state_offload(std::move(program));
}

}  // namespace zeroth
