#include "program/schedules/v_rank.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

namespace zeroth::schedules {
namespace {

/// The largest number of F without their I, which no place of W can make smaller.
int most_without_input(const std::vector<Action>& actions) {
  int now = 0;
  int most = 0;
  for (const Action& action : actions) {
    now += action.kind == ActionKind::kForward ? 1 : -1;
    most = std::max(most, now);
  }
  return most;
}

/// Runs F and I of all ranks, each in its order, in units of time.
class Filling {
 public:
  Filling(const StepProgram& program, int held)
      : program_(program),
        held_(static_cast<std::size_t>(program.ranks())),
        ends_(2 * program.rank_of_chunk.size() * static_cast<std::size_t>(program.micro_batches), kNever) {
    for (const std::vector<Action>& actions : program.actions)
      bounds_.push_back(std::max(held, most_without_input(actions)));
  }

  std::vector<std::vector<Action>> run() {
    std::vector<std::vector<Action>> result(held_.size());
    for (int time = 0; left(); ++time) {
      std::vector<Action> done;
      for (std::size_t rank = 0; rank < held_.size(); ++rank) {
        if (const auto action = next_of(rank, time)) {
          done.push_back(*action);
          result[rank].push_back(*action);
        }
      }
      for (const Action& action : done) {
        if (action.kind != ActionKind::kBackwardWeight) end_of(action) = time + 1;
      }
    }
    return result;
  }

 private:
  static constexpr int kNever = 1 << 30;
  struct Held {
    std::size_t next = 0;  ///< in the rank's list
    int pairs = 0;
    std::deque<Action> without_weight{};
  };

  int& end_of(const Action& action) {
    const std::size_t kind = action.kind == ActionKind::kForward ? 0 : 1;
    const auto pair = static_cast<std::size_t>(action.chunk) * static_cast<std::size_t>(program_.micro_batches) +
                      static_cast<std::size_t>(action.micro_batch);
    return ends_[2 * pair + kind];
  }
  [[nodiscard]] bool left() const {
    for (std::size_t rank = 0; rank < held_.size(); ++rank) {
      if (held_[rank].next < program_.actions[rank].size() || !held_[rank].without_weight.empty()) return true;
    }
    return false;
  }
  bool ready(const Action& action, int time) {
    Action before = action;
    before.chunk += action.kind == ActionKind::kForward ? -1 : 1;
    if (before.chunk >= 0 && before.chunk < program_.chunks() && end_of(before) > time) return false;
    before = {.kind = ActionKind::kForward, .chunk = action.chunk, .micro_batch = action.micro_batch};
    return action.kind == ActionKind::kForward || end_of(before) <= time;
  }
  /// F or I if it is ready and its activations have room, else a W; none while the rank waits.
  std::optional<Action> next_of(std::size_t rank, int time) {
    Held& held = held_[rank];
    const std::vector<Action>& actions = program_.actions[rank];
    if (held.next < actions.size() && ready(actions[held.next], time)) {
      const Action action = actions[held.next];
      const bool forward = action.kind == ActionKind::kForward;
      if (!forward || held.pairs < bounds_[rank]) {
        ++held.next;
        held.pairs += forward;
        if (!forward) held.without_weight.push_back(action);
        return action;
      }
    }
    if (held.without_weight.empty()) return std::nullopt;
    Action action = held.without_weight.front();
    held.without_weight.pop_front();
    action.kind = ActionKind::kBackwardWeight;
    --held.pairs;
    return action;
  }

  const StepProgram& program_;
  std::vector<Held> held_;
  std::vector<int> bounds_{};
  std::vector<int> ends_;
};

}  // namespace

StepProgram fill_with_weights(StepProgram program, int held) {
  program.actions = Filling(program, held).run();
  return program;
}

}  // namespace zeroth::schedules
