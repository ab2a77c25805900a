#include "program/checks.h"

#include <cstddef>
#include <deque>
#include <map>
#include <utility>

namespace zeroth {
namespace {

using Places = std::vector<Refutation::Place>;

/// A message of this rank that has no other end, or comes before what it sends.
std::optional<Refutation> refute_message(const StepProgram& program, const ActionIndex& index, int rank, int place) {
  const Action& message = program.actions[static_cast<std::size_t>(rank)][static_cast<std::size_t>(place)];
  const Action other = counterpart(message);
  const int other_rank = rank_of(program, other.chunk);
  if (index.position(other.kind, other.chunk, other.micro_batch) < 0) {
    return Refutation{
        .what = is_send(message.kind) ? "what a rank sends is never received" : "a rank receives what is never sent",
        .places = {place_of(program, rank, place), place_of(program, other_rank, -1)},
        .expected = to_text(other) + " on rank " + std::to_string(other_rank)};
  }
  if (!is_send(message.kind)) return std::nullopt;
  const int source = message.kind == ActionKind::kSendForward
                         ? index.position(ActionKind::kForward, message.chunk, message.micro_batch)
                         : index.gradient(message.chunk, message.micro_batch);
  if (source >= 0 && source < place) return std::nullopt;
  return Refutation{.what = "a rank sends what it has not computed",
                    .places = {place_of(program, rank, place), place_of(program, rank, source)},
                    .expected = "the other order"};
}

}  // namespace

std::optional<Refutation> refute_messages(const StepProgram& program, const ActionIndex& index) {
  std::map<Stream, std::pair<Places, Places>> streams;  // sends and receives
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    for (int place = 0; place < static_cast<int>(actions.size()); ++place) {
      const Action& action = actions[static_cast<std::size_t>(place)];
      if (!is_message(action.kind)) continue;
      if (auto refutation = refute_message(program, index, rank, place)) return refutation;
      auto& [sends, receives] = streams[stream_of(program, action)];
      (is_send(action.kind) ? sends : receives).push_back(place_of(program, rank, place));
    }
  }
  for (const auto& [stream, ends] : streams) {
    const auto& [sends, receives] = ends;  // of the same length: every one has its other end
    for (std::size_t turn = 0; turn < sends.size(); ++turn) {
      const std::string expected = to_text(counterpart(parse_action(sends[turn].action)));
      if (expected == receives[turn].action) continue;
      return Refutation{.what = "messages are received in another order than they are sent",
                        .places = {sends[turn], receives[turn]},
                        .expected = expected + " on rank " + std::to_string(stream.to)};
    }
  }
  return std::nullopt;
}

namespace {

/// Runs every rank until it waits, again and again: how far the ranks come does not depend on the order of turns.
class Run {
 public:
  explicit Run(const StepProgram& program) : program_(program), next_(program.actions.size(), 0) {}

  /// True if all come to their end.
  bool finishes() {
    std::deque<int> ready;
    for (int rank = 0; rank < program_.ranks(); ++rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      advance(rank, ready);
    }
    for (int rank = 0; rank < program_.ranks(); ++rank) {
      if (waiting(rank) != nullptr) return false;
    }
    return true;
  }
  /// The receive at which this rank waits; none at its end.
  [[nodiscard]] const Action* waiting(int rank) const {
    const std::vector<Action>& actions = program_.actions[static_cast<std::size_t>(rank)];
    const std::size_t next = next_[static_cast<std::size_t>(rank)];
    return next < actions.size() ? &actions[next] : nullptr;
  }
  [[nodiscard]] int position(int rank) const { return static_cast<int>(next_[static_cast<std::size_t>(rank)]); }

 private:
  void advance(int rank, std::deque<int>& ready) {
    while (const Action* action = waiting(rank)) {
      if (is_message(action->kind)) {
        const Stream stream = stream_of(program_, *action);
        int& under_way = under_way_[stream];
        if (is_send(action->kind)) {
          ++under_way;
          if (stream.to != rank) ready.push_back(stream.to);
        } else if (under_way == 0) {
          return;
        } else {
          --under_way;
        }
      }
      ++next_[static_cast<std::size_t>(rank)];
    }
  }

  const StepProgram& program_;
  std::vector<std::size_t> next_;
  std::map<Stream, int> under_way_{};
};

}  // namespace

std::optional<Refutation> refute_deadlock(const StepProgram& program) {
  Run run(program);
  if (run.finishes()) return std::nullopt;
  int rank = 0;
  while (run.waiting(rank) == nullptr) ++rank;
  // Every rank that waits does so for another that waits: after as many steps as there are ranks this is in the circle.
  const auto waits_for = [&](int waiter) { return stream_of(program, *run.waiting(waiter)).from; };
  for (int step = 0; step < program.ranks(); ++step) rank = waits_for(rank);
  const int other = waits_for(rank);
  std::string circle = "rank " + std::to_string(rank);
  for (int at = other; at != rank; at = waits_for(at)) circle += " waits for rank " + std::to_string(at) + ", which";
  circle += " waits for rank " + std::to_string(rank);
  return Refutation{
      .what = "ranks wait for each other: " + circle,
      .places = {place_of(program, rank, run.position(rank)), place_of(program, other, run.position(other))},
      .expected = to_text(counterpart(*run.waiting(rank))) + " on rank " + std::to_string(other) + " before it waits"};
}

}  // namespace zeroth
