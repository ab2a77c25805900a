#include "program/passes_common.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace zeroth {
namespace {

bool is_use(const Action& action) {
  return action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput ||
         action.kind == ActionKind::kRecompute;
}

/// Positions of what a rank computes, in order.
std::vector<std::size_t> computations_of(const std::vector<Action>& actions) {
  std::vector<std::size_t> places;
  for (std::size_t place = 0; place < actions.size(); ++place) {
    const ActionKind kind = actions[place].kind;
    if (is_computation(kind) || kind == ActionKind::kRecompute) places.push_back(place);
  }
  return places;
}

using Pair = std::pair<int, int>;  // chunk, micro-batch

/// The computation of a rank at which each pair rests, and the one that uses it first; as indices of computations_of().
std::map<Pair, std::pair<std::size_t, std::size_t>> rests_of(const std::vector<Action>& actions,
                                                             const std::vector<std::size_t>& computations) {
  std::map<Pair, std::pair<std::size_t, std::size_t>> rests;
  for (std::size_t turn = 0; turn < computations.size(); ++turn) {
    const Action& action = actions[computations[turn]];
    const Pair pair{action.chunk, action.micro_batch};
    if (action.kind == ActionKind::kForward) rests[pair] = {turn, turn};
    const auto rest = rests.find(pair);
    if (is_use(action) && rest != rests.end() && rest->second.second == rest->second.first) rest->second.second = turn;
  }
  return rests;
}

/// The place before `place` where the receives that belong to it begin.
std::size_t with_receives(const std::vector<Action>& actions, std::size_t place) {
  while (place > 0 && is_message(actions[place - 1].kind) && !is_send(actions[place - 1].kind)) --place;
  return place;
}

/// The place after `place` and the sends that belong to it.
std::size_t behind_sends(const std::vector<Action>& actions, std::size_t place) {
  for (++place; place < actions.size() && is_send(actions[place].kind);) ++place;
  return place;
}

/// Adds actions before places of the list.
std::vector<Action> inserted(const std::vector<Action>& actions, const std::multimap<std::size_t, Action>& added) {
  std::vector<Action> result;
  auto next = added.begin();
  for (std::size_t place = 0; place <= actions.size(); ++place) {
    for (; next != added.end() && next->first == place; ++next) result.push_back(next->second);
    if (place < actions.size()) result.push_back(actions[place]);
  }
  return result;
}

/// The same of micro-batches whose backward comes steps later.
std::map<Pair, std::pair<std::size_t, std::size_t>> late_rests_of(const StepProgram& program,
                                                                  const std::vector<Action>& actions,
                                                                  const std::vector<std::size_t>& computations) {
  std::map<Pair, std::pair<std::size_t, std::size_t>> rests;
  std::map<Pair, bool> used;
  for (std::size_t turn = 0; turn < computations.size(); ++turn) {
    const Action& action = actions[computations[turn]];
    if (program.late.empty() || program.late[static_cast<std::size_t>(action.chunk)] == 0) continue;
    const Pair pair{action.chunk, action.micro_batch};
    if (action.kind == ActionKind::kForward) rests[pair].first = turn;
    if (is_use(action) && !std::exchange(used[pair], true)) rests[pair].second = turn;
  }
  return rests;
}

std::vector<Action> offload_activations(const StepProgram& program, const std::vector<Action>& actions,
                                        std::size_t ahead) {
  const std::vector<std::size_t> computations = computations_of(actions);
  std::multimap<std::size_t, Action> flushes;
  std::multimap<std::size_t, Action> fetches;
  const auto add = [&](const Pair& pair, std::size_t forward, std::size_t fetch) {
    flushes.insert({behind_sends(actions, computations[forward]),
                    {.kind = ActionKind::kFlush, .chunk = pair.first, .micro_batch = pair.second}});
    fetches.insert({with_receives(actions, computations[fetch]),
                    {.kind = ActionKind::kFetch, .chunk = pair.first, .micro_batch = pair.second}});
  };
  const auto late = late_rests_of(program, actions, computations);
  for (const auto& [pair, rest] : late) add(pair, rest.first, rest.second > ahead ? rest.second - ahead : 0);
  for (const auto& [pair, rest] : rests_of(actions, computations)) {
    const auto [forward, use] = rest;
    if (use <= forward + 1 || late.contains(pair)) continue;  // no computation between, or no backward
    add(pair, forward, std::min(std::max(use > ahead ? use - ahead : 0, forward + 2), use));
  }
  flushes.insert(fetches.begin(), fetches.end());  // at one place what goes, goes first
  return inserted(actions, flushes);
}

/// FETCH of all chunks before each STEP, FLUSH after it.
std::vector<Action> offload_states(const std::vector<Action>& actions, const std::vector<int>& chunks) {
  std::vector<Action> result;
  for (const Action& action : actions) {
    const bool steps = action.kind == ActionKind::kStep;
    for (const int chunk : chunks)
      if (steps) result.push_back({.kind = ActionKind::kFetch, .chunk = chunk});
    result.push_back(action);
    for (const int chunk : chunks)
      if (steps) result.push_back({.kind = ActionKind::kFlush, .chunk = chunk});
  }
  return result;
}

}  // namespace

StepProgram add_recompute(StepProgram program, const std::vector<bool>& chunks) {
  require_none(program, "add_recompute", [](const Action& action) { return action.kind == ActionKind::kRecompute; });
  ZR_CHECK(chunks.empty() || chunks.size() == program.rank_of_chunk.size(), ErrorCode::kUsage,
           "what recomputes is not said of every chunk",
           {.where = "program.add_recompute",
            .expected = std::to_string(program.chunks()) + " values, or none",
            .got = std::to_string(chunks.size())});
  for (std::vector<Action>& actions : program.actions) {
    const std::vector<std::size_t> computations = computations_of(actions);
    std::multimap<std::size_t, Action> added;
    const auto add = [&](const Pair& pair, std::size_t use) {
      added.insert({with_receives(actions, computations[use]),
                    {.kind = ActionKind::kRecompute, .chunk = pair.first, .micro_batch = pair.second}});
    };
    const auto late = late_rests_of(program, actions, computations);
    for (const auto& [pair, rest] : late) add(pair, rest.second);
    for (const auto& [pair, rest] : rests_of(actions, computations)) {
      const auto [forward, use] = rest;
      if (late.contains(pair) || use <= forward + 1 ||
          (!chunks.empty() && !chunks[static_cast<std::size_t>(pair.first)]))
        continue;
      add(pair, use);
    }
    actions = inserted(actions, added);
  }
  return program;
}

StepProgram add_activation_offload(StepProgram program, int ahead) {
  require_none(program, "add_activation_offload", [](const Action& action) {
    return (action.kind == ActionKind::kFetch || action.kind == ActionKind::kFlush) && action.micro_batch >= 0;
  });
  ZR_CHECK(ahead >= 0, ErrorCode::kUsage, "a FETCH cannot come after its use",
           {.where = "program.add_activation_offload", .expected = "ahead from 0", .got = std::to_string(ahead)});
  for (std::vector<Action>& actions : program.actions)
    actions = offload_activations(program, actions, static_cast<std::size_t>(ahead));
  return program;
}

StepProgram add_state_offload(StepProgram program) {
  require_none(program, "add_state_offload", [](const Action& action) {
    return (action.kind == ActionKind::kFetch || action.kind == ActionKind::kFlush) && action.micro_batch < 0;
  });
  for (int rank = 0; rank < program.ranks(); ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const bool steps = std::ranges::find(actions, ActionKind::kStep, &Action::kind) != actions.end();
    ZR_CHECK(steps, ErrorCode::kUsage, "states are offloaded around a step, and there is none",
             {.where = "program.add_state_offload",
              .who = "rank " + std::to_string(rank),
              .hint = "add_step() comes before"});
    actions = offload_states(actions, program.chunks_of(rank));
  }
  return program;
}

}  // namespace zeroth
