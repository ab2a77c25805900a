#include "program/structure.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <cstddef>

namespace zeroth {
namespace {

constexpr int kNeighbours = 2;  // actions that a message shows on each side

std::string range(int size) {
  return "0 to " + std::to_string(size - 1);
}

std::optional<Refutation> refute_numbers(const StepProgram& program) {
  if (program.actions.empty() || program.rank_of_chunk.empty() || program.micro_batches < 1)
    return Refutation{.what = "a program needs ranks, chunks and micro-batches", .expected = "at least one of each"};
  for (const char c : program.schedule) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == 0x7f)
      return Refutation{.what = "the name of the schedule has blanks or control characters", .expected = "one word"};
  }
  for (const int rank : program.rank_of_chunk) {
    if (rank < 0 || rank >= program.ranks())
      return Refutation{.what = "a chunk is on a rank that is not there: " + std::to_string(rank),
                        .expected = range(program.ranks())};
  }
  if (program.late.empty()) return std::nullopt;
  if (!program.inexact || program.late.size() != program.rank_of_chunk.size() || std::ranges::min(program.late) < 0)
    return Refutation{.what = "a program does not say how late the gradients of its chunks are",
                      .expected = "inexact, and a number of steps from 0 for each chunk"};
  std::size_t actions = 0;
  for (const std::vector<Action>& list : program.actions) actions += list.size();
  // Twice as many steps as the latest gradient needs are looked at together.
  if (2 * (static_cast<std::size_t>(program.most_late()) + 1) * actions > kMostActions)
    return Refutation{.what = "gradients are too late for a program of this length",
                      .expected = "at most " + std::to_string(kMostActions) + " actions in all steps until they come"};
  return std::nullopt;
}

/// "" for an action that may stand in the list of this rank.
std::string fault_of(const StepProgram& program, int rank, const Action& action) {
  if (!has_its_numbers(action)) return "an action has a number too much or too few";
  if (action.kind == ActionKind::kStep) return "";
  if (action.chunk >= program.chunks()) return "an action is of a chunk that is not there";
  if (action.micro_batch >= program.micro_batches) return "an action is of a micro-batch that is not there";
  if (is_vocabulary(action.kind)) return program.late.empty() ? "" : "stages share a head, and gradients are late";
  if (rank_of(program, action.chunk) != rank) return "an action is on a rank that does not have its chunk";
  if (!is_message(action.kind)) return "";
  const int other = other_chunk(action);
  if (other < 0 || other >= program.chunks()) return "a message goes beyond the first or the last chunk";
  if (rank_of(program, other) == rank) return "a message goes from a rank to itself";
  return "";
}

std::string with_neighbours(const std::vector<Action>& actions, const Refutation::Place& place) {
  std::string text = "rank " + std::to_string(place.rank) + ":";
  const int size = static_cast<int>(actions.size());
  const int begin = std::max(0, place.index - kNeighbours);
  const int end = std::min(size, place.index + kNeighbours + 1);
  if (begin > 0) text += " ...";
  for (int index = begin; index < end; ++index) {
    const std::string action = to_text(actions[static_cast<std::size_t>(index)]);
    text += index == place.index ? " [" + action + "]" : " " + action;
  }
  if (place.index >= size) text += " [end]";
  if (end < size) text += " ...";
  return text;
}

}  // namespace

int other_chunk(const Action& message) {
  const bool next = message.kind == ActionKind::kSendForward || message.kind == ActionKind::kRecvBackward;
  return next ? message.chunk + 1 : message.chunk - 1;
}

Stream stream_of(const StepProgram& program, const Action& message) {
  const int own = rank_of(program, message.chunk);
  const int other = rank_of(program, other_chunk(message));
  const bool forward = message.kind == ActionKind::kSendForward || message.kind == ActionKind::kRecvForward;
  return is_send(message.kind) ? Stream{.from = own, .to = other, .forward = forward}
                               : Stream{.from = other, .to = own, .forward = forward};
}

Action counterpart(const Action& message) {
  Action other{.chunk = other_chunk(message), .micro_batch = message.micro_batch};
  switch (message.kind) {
    case ActionKind::kSendForward:
      other.kind = ActionKind::kRecvForward;
      break;
    case ActionKind::kRecvForward:
      other.kind = ActionKind::kSendForward;
      break;
    case ActionKind::kSendBackward:
      other.kind = ActionKind::kRecvBackward;
      break;
    default:
      other.kind = ActionKind::kSendBackward;
  }
  return other;
}

std::optional<Refutation> refute_structure(const StepProgram& program) {
  if (auto refutation = refute_numbers(program)) return refutation;
  for (int rank = 0; rank < program.ranks(); ++rank) {
    const std::vector<Action>& actions = program.actions[static_cast<std::size_t>(rank)];
    for (std::size_t index = 0; index < actions.size(); ++index) {
      std::string fault = fault_of(program, rank, actions[index]);
      if (fault.empty()) continue;
      return Refutation{
          .what = std::move(fault),
          .places = {{.rank = rank, .index = static_cast<int>(index), .action = to_text(actions[index])}},
          .expected = "chunks " + range(program.chunks()) + ", micro-batches " + range(program.micro_batches)};
    }
  }
  return std::nullopt;
}

void throw_refutation(const StepProgram& program, const Refutation& refutation, const char* function) {
  ErrorContext context{.where = std::string("program.") + function,
                       .which = refute_numbers(program) ? "" : program.schedule,
                       .expected = refutation.expected};
  for (const Refutation::Place& place : refutation.places) {
    const std::string separator = context.who.empty() ? "" : "; ";
    context.who += (separator.empty() ? "rank " : ", rank ") + std::to_string(place.rank) + " at " +
                   (place.action.empty() ? "its end" : place.action);
    context.got += separator + with_neighbours(program.actions[static_cast<std::size_t>(place.rank)], place);
  }
  throw Error(ErrorCode::kUsage, refutation.what, std::move(context));
}

void require_structure(const StepProgram& program, const char* function) {
  if (const auto refutation = refute_structure(program)) throw_refutation(program, *refutation, function);
}

}  // namespace zeroth
