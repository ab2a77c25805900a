#include "program/checks.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace zeroth {
namespace {

/// UNSHARD and RESHARD of the chunks of one rank.
std::optional<Refutation> refute_gathers(const StepProgram& program, int rank) {
  const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
  std::map<int, int> last;  // of a chunk that is sharded, the last UNSHARD or RESHARD; -1: none yet
  std::map<int, bool> whole;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard) last[action.chunk] = -1;
  }
  const auto refuted = [&](const char* what, int place, int chunk, const std::string& expected) {
    Refutation refutation{.what = what, .places = {place_of(program, rank, place)}, .expected = expected};
    if (last[chunk] >= 0) refutation.places.push_back(place_of(program, rank, last[chunk]));
    return refutation;
  };
  for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
    const Action& action = actions[static_cast<std::size_t>(place)];
    if (!last.contains(action.chunk)) continue;
    const bool is_whole = whole[action.chunk];
    const std::string chunk = std::to_string(action.chunk);
    if (action.kind == ActionKind::kUnshard || action.kind == ActionKind::kReshard) {
      const bool gathers = action.kind == ActionKind::kUnshard;
      if (gathers == is_whole)
        return refuted(gathers ? "a chunk is gathered that is whole" : "a chunk is given back that is not whole", place,
                       action.chunk, gathers ? chunk + "RESHARD before it" : chunk + "UNSHARD before it");
      whole[action.chunk] = gathers;
      last[action.chunk] = place;
    } else if ((is_computation(action.kind) || action.kind == ActionKind::kRecompute) && !is_whole) {
      return refuted("a chunk computes without its parameters", place, action.chunk, chunk + "UNSHARD before it");
    }
  }
  for (const auto& [chunk, is_whole] : whole) {
    if (is_whole)
      return refuted("a chunk is gathered and never given back", last[chunk], -1, std::to_string(chunk) + "RESHARD");
  }
  return std::nullopt;
}

/// REDUCE and STEP of one rank.
std::optional<Refutation> refute_ends(const StepProgram& program, int rank, bool reduces, bool steps) {
  const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
  std::map<int, int> reduced;
  int step = -1;
  for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
    const Action& action = actions[static_cast<std::size_t>(place)];
    const auto conflict = [&](const char* what, int before, const char* expected) {
      return Refutation{.what = what,
                        .places = {place_of(program, rank, place), place_of(program, rank, before)},
                        .expected = expected};
    };
    if (step >= 0) return conflict("an action comes after the step", step, "STEP at the end");
    if (action.kind == ActionKind::kStep) step = place;
    const auto before = reduced.find(action.chunk);
    const bool adds = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight;
    if (before != reduced.end() && adds)
      return conflict("gradients are reduced before the last of them is there", before->second, "REDUCE after it");
    if (before != reduced.end() && action.kind == ActionKind::kReduce)
      return conflict("gradients are reduced twice", before->second, "once");
    if (action.kind == ActionKind::kReduce) reduced[action.chunk] = place;
  }
  if (steps && step < 0)
    return Refutation{
        .what = "a rank does not step, but others do", .places = {place_of(program, rank, -1)}, .expected = "STEP"};
  for (const int chunk : program.chunks_of(rank)) {
    if (reduces && !reduced.contains(chunk))
      return Refutation{.what = "the gradients of a chunk are never reduced, but those of others are",
                        .places = {place_of(program, rank, -1)},
                        .expected = std::to_string(chunk) + "REDUCE"};
  }
  return std::nullopt;
}

bool has(const StepProgram& program, ActionKind kind) {
  return std::ranges::any_of(program.actions, [&](const std::vector<Action>& actions) {
    return std::ranges::find(actions, kind, &Action::kind) != actions.end();
  });
}

}  // namespace

std::optional<Refutation> refute_states(const StepProgram& program) {
  const bool reduces = has(program, ActionKind::kReduce);
  const bool steps = has(program, ActionKind::kStep);
  for (int rank = 0; rank < program.ranks(); ++rank) {
    if (auto refutation = refute_gathers(program, rank)) return refutation;
    if (auto refutation = refute_ends(program, rank, reduces, steps)) return refutation;
  }
  return std::nullopt;
}

std::optional<Refutation> refute_in_flight(const StepProgram& program, const std::vector<int>& bounds) {
  if (bounds.empty()) return std::nullopt;
  if (bounds.size() != program.actions.size())
    return Refutation{.what = "the bounds of activations are not one a rank",
                      .expected = std::to_string(program.ranks()) + " bounds"};
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const int bound = bounds[static_cast<std::size_t>(rank)];
    int held = 0;
    for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
      const ActionKind kind = actions[static_cast<std::size_t>(place)].kind;
      held += kind == ActionKind::kForward;
      held -= kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
      if (held <= bound) continue;
      return Refutation{.what = "a rank holds the activations of too many micro-batches",
                        .places = {place_of(program, rank, place)},
                        .expected = "at most " + std::to_string(bound)};
    }
  }
  return std::nullopt;
}

}  // namespace zeroth
