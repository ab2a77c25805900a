// RunningAction: the action that a rank is in, as one word that it can leave for other ranks to read, and as text.
#pragma once

#include <zeroth/comm/rank_activity.h>
#include <zeroth/program/action.h>

#include <string>

namespace zeroth::libtorch {

struct RunningAction {
  Action action{};
  int stage = 0;
  int stages = 1;
  bool trains = true;  ///< false: of an evaluation
};

/// Numbers that do not fit are the largest that do: 2,047 stages, 16,382 chunks, 4,194,302 micro-batches. Never 0.
[[nodiscard]] ActionWord word_of(const RunningAction& running) noexcept;
/// Of any word: another process may have written it.
[[nodiscard]] RunningAction running_of(ActionWord word) noexcept;
/// For RankActivity::set_action_reader(): "1B3", "stage 1 of 2: the backward of chunk 1, micro-batch 3".
[[nodiscard]] ActionText text_of(ActionWord word);
/// The phase of a step that an action is of.
[[nodiscard]] Phase phase_of(const RunningAction& running) noexcept;

}  // namespace zeroth::libtorch
