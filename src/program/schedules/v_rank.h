// What schedules with two chunks a rank share: the placement as a V, and the list of one rank under construction.
#pragma once

#include "program/schedules/table.h"

#include <array>
#include <cstddef>
#include <deque>
#include <string_view>
#include <vector>

namespace zeroth::schedules {

/// Empty lists for the ranks; rank r has chunk r, on the way down, and chunk 2 ranks - 1 - r, on the way up.
[[nodiscard]] StepProgram placed_as_v(std::string_view name, const ScheduleOptions& options);

enum class Way : std::size_t { kDown = 0, kUp = 1 };

/// The list of a rank. Each call appends the next micro-batch of its kind; weight() the oldest I without a W.
class VRank {
 public:
  VRank(int ranks, int rank) : chunks_{rank, 2 * ranks - 1 - rank} {}

  void forward(Way way) { append(ActionKind::kForward, way, forwards_); }
  void backward(Way way) { append(ActionKind::kBackward, way, backwards_); }
  void input(Way way) {
    append(ActionKind::kBackwardInput, way, backwards_);
    without_weight_.push_back(actions_.back());
  }
  void weight() {
    Action action = without_weight_.front();
    without_weight_.pop_front();
    action.kind = ActionKind::kBackwardWeight;
    actions_.push_back(action);
  }
  void all_weights() {
    while (!without_weight_.empty()) weight();
  }
  [[nodiscard]] int forwards(Way way) const { return forwards_[static_cast<std::size_t>(way)]; }
  [[nodiscard]] int backwards(Way way) const { return backwards_[static_cast<std::size_t>(way)]; }
  [[nodiscard]] std::vector<Action> take() { return std::move(actions_); }

 private:
  void append(ActionKind kind, Way way, std::array<int, 2>& next) {
    const auto index = static_cast<std::size_t>(way);
    actions_.push_back({.kind = kind, .chunk = chunks_[index], .micro_batch = next[index]++});
  }

  std::array<int, 2> chunks_;
  std::array<int, 2> forwards_{};
  std::array<int, 2> backwards_{};
  std::deque<Action> without_weight_{};
  std::vector<Action> actions_{};
};

/// Puts the W of a program of F and I where a rank would wait, if each action takes one unit of time, and where it
/// would hold more than `held` pairs of chunk and micro-batch; but at least as many as its F and I hold in any case.
[[nodiscard]] StepProgram fill_with_weights(StepProgram program, int held);

}  // namespace zeroth::schedules
