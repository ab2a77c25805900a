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
  /// `before`: the other action in conflict, if it is not -1.
  const auto refuted = [&](const char* what, int place, int before, const std::string& expected) {
    Refutation refutation{.what = what, .places = {place_of(program, rank, place)}, .expected = expected};
    if (before >= 0) refutation.places.push_back(place_of(program, rank, before));
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
                       last[action.chunk], gathers ? chunk + "RESHARD before it" : chunk + "UNSHARD before it");
      whole[action.chunk] = gathers;
      last[action.chunk] = place;
    } else if (reads_parameters(action.kind) && !is_whole) {
      return refuted("a chunk computes without its parameters", place, last[action.chunk], chunk + "UNSHARD before it");
    }
  }
  for (const auto& [chunk, is_whole] : whole) {
    if (is_whole)
      return refuted("a chunk is gathered and never given back", last[chunk], -1, std::to_string(chunk) + "RESHARD");
  }
  return std::nullopt;
}

/// FETCH and FLUSH of states: in turn, with STEP between them.
std::optional<Refutation> refute_offloads(const StepProgram& program, int rank) {
  const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
  std::map<int, int> last;  // of a chunk whose states are offloaded, its last FETCH; -1: they are away
  for (const Action& action : actions) {
    const bool moves = action.kind == ActionKind::kFetch || action.kind == ActionKind::kFlush;
    if (moves && action.micro_batch < 0) last[action.chunk] = -1;
  }
  for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
    const Action& action = actions[static_cast<std::size_t>(place)];
    const bool moves = action.kind == ActionKind::kFetch || action.kind == ActionKind::kFlush;
    if (moves && action.micro_batch < 0) {
      const bool fetch = action.kind == ActionKind::kFetch;
      if (fetch == (last[action.chunk] >= 0))
        return Refutation{
            .what = fetch ? "states are fetched that are there" : "states are moved away that are not there",
            .places = {place_of(program, rank, place)},
            .expected = std::to_string(action.chunk) + (fetch ? "FLUSH before it" : "FETCH before it")};
      last[action.chunk] = fetch ? place : -1;
    }
    for (const auto& [chunk, fetched] : last) {
      if (action.kind == ActionKind::kStep && fetched < 0)
        return Refutation{.what = "a rank steps without the states of a chunk",
                          .places = {place_of(program, rank, place)},
                          .expected = std::to_string(chunk) + "FETCH before it"};
    }
  }
  for (const auto& [chunk, fetched] : last) {
    if (fetched >= 0)
      return Refutation{.what = "states are fetched and never moved away",
                        .places = {place_of(program, rank, fetched)},
                        .expected = std::to_string(chunk) + "FLUSH after it"};
  }
  return std::nullopt;
}

/// REDUCE and STEP of one rank.
class EndsCheck {
 public:
  EndsCheck(const StepProgram& program, int rank, bool reduces) : program_(program), rank_(rank), reduces_(reduces) {}

  std::optional<Refutation> take(int place, const Action& action) {
    const bool late = action.kind != ActionKind::kFlush || action.micro_batch >= 0;
    if (step_ >= 0 && !program_.inexact && late)
      return refuted("an action comes after the step", place, step_, "STEP at the end");
    if (action.kind == ActionKind::kStep) {
      if (auto refutation = refute_missing(place)) return refutation;
      step_ = place;
      added_.clear();
      reduced_.clear();
    }
    const auto before = reduced_.find(action.chunk);
    const bool adds = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight;
    if (before != reduced_.end() && adds)
      return refuted("gradients are reduced before the last of them is there", place, before->second,
                     "REDUCE after it");
    if (before != reduced_.end() && action.kind == ActionKind::kReduce)
      return refuted("gradients are reduced twice", place, before->second, "once");
    if (action.kind == ActionKind::kReduce) reduced_[action.chunk] = place;
    if (adds) added_[action.chunk] = place;
    return std::nullopt;
  }
  /// At the end of the list.
  std::optional<Refutation> end(bool steps) {
    const bool stepped = step_ >= 0 && added_.empty();
    if (steps && !stepped)
      return Refutation{
          .what = "a rank does not step, but others do", .places = {place_of(program_, rank_, -1)}, .expected = "STEP"};
    return refute_missing(-1);
  }

 private:
  Refutation refuted(const char* what, int place, int before, const char* expected) const {
    return {.what = what,
            .places = {place_of(program_, rank_, place), place_of(program_, rank_, before)},
            .expected = expected};
  }
  /// Gradients that no REDUCE took before this place.
  [[nodiscard]] std::optional<Refutation> refute_missing(int place) const {
    for (const auto& [chunk, backward] : added_) {
      if (!reduces_ || reduced_.contains(chunk)) continue;
      return Refutation{.what = "gradients are not reduced before the step, but those of others are",
                        .places = {place_of(program_, rank_, place), place_of(program_, rank_, backward)},
                        .expected = std::to_string(chunk) + "REDUCE between them"};
    }
    return std::nullopt;
  }

  const StepProgram& program_;
  int rank_;
  bool reduces_;
  int step_ = -1;
  std::map<int, int> added_{};    // of a chunk, its last backward since the step
  std::map<int, int> reduced_{};  // and its REDUCE
};

std::optional<Refutation> refute_ends(const StepProgram& program, int rank, bool reduces, bool steps) {
  const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
  EndsCheck check(program, rank, reduces);
  for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
    if (auto refutation = check.take(place, actions[static_cast<std::size_t>(place)])) return refutation;
  }
  return check.end(steps);
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
    if (auto refutation = refute_offloads(program, rank)) return refutation;
    if (auto refutation = refute_ends(program, rank, reduces, steps)) return refutation;
  }
  return std::nullopt;
}

int change_of_held(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return 1;
    case ActionKind::kBackward:
    case ActionKind::kBackwardWeight:
      return -1;
    case ActionKind::kFetch:
      return action.micro_batch >= 0 ? 1 : 0;
    case ActionKind::kFlush:
      return action.micro_batch >= 0 ? -1 : 0;
    default:
      return 0;
  }
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
      held += change_of_held(actions[static_cast<std::size_t>(place)]);
      if (held <= bound) continue;
      return Refutation{.what = "a rank holds the activations of too many micro-batches",
                        .places = {place_of(program, rank, place)},
                        .expected = "at most " + std::to_string(bound)};
    }
  }
  return std::nullopt;
}

}  // namespace zeroth
