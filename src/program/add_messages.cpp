#include "program/structure.h"

#include <zeroth/base/error.h>
#include <zeroth/program/passes.h>

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <utility>

namespace zeroth {
namespace {

/// What a computation receives before it starts, none if it has it on its own rank.
std::optional<Action> received_by(const StepProgram& program, const Action& action) {
  const bool forward = action.kind == ActionKind::kForward;
  if (!is_computation(action.kind) || action.kind == ActionKind::kBackwardWeight) return std::nullopt;
  const int other = forward ? action.chunk - 1 : action.chunk + 1;
  if (other < 0 || other >= program.chunks()) return std::nullopt;
  if (rank_of(program, other) == rank_of(program, action.chunk)) return std::nullopt;
  return Action{.kind = forward ? ActionKind::kRecvForward : ActionKind::kRecvBackward,
                .chunk = action.chunk,
                .micro_batch = action.micro_batch};
}

/// What is sent when it is over.
std::optional<Action> sent_by(const StepProgram& program, const Action& action) {
  const bool forward = action.kind == ActionKind::kForward;
  if (!is_computation(action.kind) || action.kind == ActionKind::kBackwardWeight) return std::nullopt;
  const int other = forward ? action.chunk + 1 : action.chunk - 1;
  if (other < 0 || other >= program.chunks()) return std::nullopt;
  if (rank_of(program, other) == rank_of(program, action.chunk)) return std::nullopt;
  return Action{.kind = forward ? ActionKind::kSendForward : ActionKind::kSendBackward,
                .chunk = action.chunk,
                .micro_batch = action.micro_batch};
}

using Sent = std::map<Stream, std::deque<Action>>;  // the receives of what was sent, in its order

/// Receives, in the order of the sends, until `wanted` is there.
void receive(const StepProgram& program, const Action& wanted, Sent& sent, std::map<Stream, std::vector<Action>>& early,
             std::vector<Action>& result) {
  const Stream stream = stream_of(program, wanted);
  if (std::erase(early[stream], wanted) != 0) return;
  std::deque<Action>& waiting = sent[stream];
  while (true) {
    ZR_CHECK(!waiting.empty(), ErrorCode::kUsage, "a computation needs what no rank computes",
             {.where = "program.add_messages",
              .who = "rank " + std::to_string(stream.to) + ", from rank " + std::to_string(stream.from),
              .which = program.schedule,
              .expected = to_text(counterpart(wanted)),
              .got = to_text(wanted)});
    const Action next = waiting.front();
    waiting.pop_front();
    result.push_back(next);
    if (next == wanted) return;
    early[stream].push_back(next);
  }
}

}  // namespace

StepProgram add_messages(StepProgram program) {
  require_structure(program, "add_messages");
  Sent sent;
  for (const std::vector<Action>& actions : program.actions) {
    for (const Action& action : actions) {
      ZR_CHECK(!is_message(action.kind), ErrorCode::kUsage, "the program already has messages",
               {.where = "program.add_messages", .which = program.schedule, .got = to_text(action)});
      if (const auto message = sent_by(program, action))
        sent[stream_of(program, *message)].push_back(counterpart(*message));
    }
  }
  std::map<Stream, std::vector<Action>> early;
  for (std::vector<Action>& actions : program.actions) {
    std::vector<Action> result;
    std::vector<Action> for_later;
    for (const Action& action : actions) {
      const auto message = received_by(program, action);
      const bool later = message && program.lateness(*message) < program.lateness(action);
      if (later) for_later.push_back(*message);
      if (message && !later) receive(program, *message, sent, early, result);
      result.push_back(action);
      if (const auto own = sent_by(program, action)) result.push_back(*own);
    }
    for (const Action& message : for_later) receive(program, message, sent, early, result);
    actions = std::move(result);
  }
  return program;
}

}  // namespace zeroth
