#include "program/checks.h"

#include <cstddef>
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

}  // namespace zeroth
