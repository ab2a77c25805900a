#include "program/passes_common.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

namespace zeroth {
namespace {

constexpr int kNever = 1 << 30;

/// The same actions, with every backward behind `count` more forwards of its rank, where there are so many.
std::vector<Action> later_backwards(const std::vector<Action>& actions, int count) {
  std::vector<Action> forwards;
  for (const Action& action : actions)
    if (action.kind == ActionKind::kForward) forwards.push_back(action);
  std::vector<Action> result;
  std::size_t before = 0;  // forwards before the backward, as it was
  std::size_t taken = 0;
  for (const Action& action : actions) {
    if (action.kind == ActionKind::kForward) {
      ++before;
      continue;
    }
    while (taken < std::min(before + static_cast<std::size_t>(count), forwards.size()))
      result.push_back(forwards[taken++]);
    result.push_back(action);
  }
  while (taken < forwards.size()) result.push_back(forwards[taken++]);
  return result;
}

/// Runs all ranks in units of time; each has its list, and the parts of the output layer, which stand in the order of
/// the micro-batches on every rank.
class Placing {
 public:
  Placing(const StepProgram& program, bool two_barriers)
      : program_(program),
        two_barriers_(two_barriers),
        states_(program.actions.size()),
        forwards_(pairs(), kNever),
        gradients_(pairs(), kNever),
        scored_(static_cast<std::size_t>(program.micro_batches)),
        summed_(scored_.size()) {
    for (const Action& action : program.actions[static_cast<std::size_t>(program.rank_of_chunk.back())]) {
      if (action.kind == ActionKind::kForward && action.chunk == program.chunks() - 1)
        order_.push_back(action.micro_batch);
    }
  }

  std::vector<std::vector<Action>> run() {
    for (int time = 0; left(); ++time) {
      bool moved = false;
      for (State& state : states_) {
        moved = moved || state.busy_until > time;
        if (state.busy_until <= time) moved = turn(state, time) || moved;
      }
      ZR_CHECK(moved, ErrorCode::kUsage, "ranks of this schedule wait for each other if its output layer is split",
               {.where = "program.add_vocabulary", .which = program_.schedule});
    }
    std::vector<std::vector<Action>> lists;
    for (State& state : states_) lists.push_back(std::move(state.list));
    return lists;
  }

 private:
  struct State {
    std::size_t next = 0;    ///< of the rank's own actions
    std::size_t scores = 0;  ///< micro-batches of order_ that have their V_S
    std::size_t gradients = 0;
    int busy_until = 0;
    std::vector<Action> list{};
  };
  /// How many ranks have done their part, and when the last of them was over.
  struct Barrier {
    int ranks = 0;
    int end = 0;
  };

  [[nodiscard]] std::size_t pairs() const {
    return program_.rank_of_chunk.size() * static_cast<std::size_t>(program_.micro_batches);
  }
  [[nodiscard]] std::size_t pair(int chunk, int m) const {
    return static_cast<std::size_t>(chunk) * static_cast<std::size_t>(program_.micro_batches) +
           static_cast<std::size_t>(m);
  }
  [[nodiscard]] std::size_t rank_of(const State& state) const {
    return static_cast<std::size_t>(&state - states_.data());
  }
  [[nodiscard]] bool left() const {
    return std::ranges::any_of(states_, [&](const State& state) {
      return state.next < program_.actions[rank_of(state)].size() || state.gradients < order_.size();
    });
  }
  [[nodiscard]] bool over(const std::vector<Barrier>& barriers, int m, int time) const {
    const Barrier& barrier = barriers[static_cast<std::size_t>(m)];
    return barrier.ranks == program_.ranks() && barrier.end <= time;
  }

  /// Whether the rank does something at this time.
  bool turn(State& state, int time) {
    const bool may_score = two_barriers_ ? state.scores == state.gradients : state.scores < state.gradients + 2;
    if (state.gradients < state.scores && (two_barriers_ || !may_score) && gradients(state, time)) return true;
    if (may_score && scores(state, time)) return true;
    const std::vector<Action>& own = program_.actions[rank_of(state)];
    if (state.next < own.size() && ready(own[state.next], time)) {
      const Action& action = own[state.next++];
      state.busy_until = time + (action.kind == ActionKind::kBackward ? 2 : 1);
      if (action.kind == ActionKind::kForward) forwards_[pair(action.chunk, action.micro_batch)] = state.busy_until;
      const bool first = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
      if (first) gradients_[pair(action.chunk, action.micro_batch)] = state.busy_until;
      state.list.push_back(action);
      return true;
    }
    return state.gradients < state.scores && gradients(state, time);
  }

  bool scores(State& state, int time) {
    if (state.scores == order_.size()) return false;
    const int m = order_[state.scores];
    if (forwards_[pair(program_.chunks() - 1, m)] > time) return false;
    ++state.scores;
    for (const ActionKind kind : {ActionKind::kVocabInput, ActionKind::kVocabScores, ActionKind::kVocabSum})
      state.list.push_back({.kind = kind, .micro_batch = m});
    pass(scored_[static_cast<std::size_t>(m)], state, time);
    return true;
  }

  bool gradients(State& state, int time) {
    const int m = order_[state.gradients];
    if (!over(scored_, m, time)) return false;
    ++state.gradients;
    state.list.push_back({.kind = ActionKind::kVocabGradients, .micro_batch = m});
    if (two_barriers_) state.list.push_back({.kind = ActionKind::kVocabInputGradient, .micro_batch = m});
    pass(summed_[static_cast<std::size_t>(m)], state, time);
    return true;
  }

  static void pass(Barrier& barrier, State& state, int time) {
    state.busy_until = time + 1;
    ++barrier.ranks;
    barrier.end = std::max(barrier.end, state.busy_until);
  }

  [[nodiscard]] bool ready(const Action& action, int time) const {
    const auto [kind, chunk, m] = action;
    if (kind == ActionKind::kForward) return chunk == 0 || forwards_[pair(chunk - 1, m)] <= time;
    if (kind == ActionKind::kBackwardWeight) return gradients_[pair(chunk, m)] <= time;
    if (forwards_[pair(chunk, m)] > time) return false;
    if (chunk + 1 < program_.chunks()) return gradients_[pair(chunk + 1, m)] <= time;
    return over(two_barriers_ ? summed_ : scored_, m, time);
  }

  const StepProgram& program_;
  bool two_barriers_;
  std::vector<State> states_;
  std::vector<int> forwards_;   // when each pair of chunk and micro-batch is over
  std::vector<int> gradients_;  // its B or I
  std::vector<Barrier> scored_;
  std::vector<Barrier> summed_;
  std::vector<int> order_{};  // of the micro-batches in the last chunk
};

}  // namespace

StepProgram add_vocabulary(StepProgram program, Vocabulary vocabulary) {
  require_none(program, "add_vocabulary", [](const Action& action) { return !is_computation(action.kind); });
  if (vocabulary == Vocabulary::kNone) return program;
  ZR_CHECK(program.late.empty(), ErrorCode::kUsage, "stages share a head, and its gradients are late",
           {.where = "program.add_vocabulary",
            .which = program.schedule,
            .expected = "a head on the last stage",
            .hint = "zeroth.pipeline.vocabulary = \"whole\", or a schedule that is exact"});
  const bool two_barriers = vocabulary == Vocabulary::kTwoBarriers;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    const auto chunks = static_cast<int>(program.chunks_of(rank).size());
    actions = later_backwards(actions, std::max(chunks, two_barriers ? 2 : 1));
  }
  program.actions = Placing(program, two_barriers).run();
  return program;
}

}  // namespace zeroth
