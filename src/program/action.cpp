#include <zeroth/base/error.h>
#include <zeroth/program/action.h>

#include <array>
#include <charconv>

namespace zeroth {
namespace {

constexpr std::array<std::string_view, 20> kNames{
    "F",      "B",     "I",     "W",         "SEND_F",  "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD",
    "REDUCE", "FETCH", "FLUSH", "RECOMPUTE", "V_INPUT", "V_S",    "V_SUM",  "V_T",    "V_GRAD",  "STEP"};
static_assert(kNames.size() == static_cast<std::size_t>(ActionKind::kStep) + 1);

/// The number that `text` begins with, and the rest; -1 without one.
int take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0) return -1;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

}  // namespace

std::string_view name_of(ActionKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

std::string to_text(const Action& action) {
  std::string text;
  if (action.chunk >= 0) text += std::to_string(action.chunk);
  text += name_of(action.kind);
  if (action.micro_batch >= 0) text += std::to_string(action.micro_batch);
  return text;
}

Action parse_action(std::string_view text) {
  std::string_view rest = text;
  Action action;
  action.chunk = take_number(rest);
  const std::size_t end = rest.find_first_of("0123456789");
  const std::string_view name = rest.substr(0, end);
  rest.remove_prefix(name.size());
  action.micro_batch = take_number(rest);
  for (std::size_t kind = 0; kind < kNames.size(); ++kind) {
    if (kNames[kind] != name) continue;
    action.kind = static_cast<ActionKind>(kind);
    if (rest.empty() && has_its_numbers(action) && to_text(action) == text) return action;
  }
  throw Error(ErrorCode::kUsage, "this is no action of a program",
              {.where = "program.action",
               .which = std::string(text),
               .expected = "a chunk, an action and a micro-batch, as 2F0, 2SEND_F0, 0UNSHARD or STEP"});
}

bool reads_parameters(ActionKind kind) noexcept {
  return kind == ActionKind::kRecompute || (is_computation(kind) && kind != ActionKind::kBackwardWeight);
}

bool is_computation(ActionKind kind) noexcept {
  return kind == ActionKind::kForward || is_backward(kind);
}

bool is_backward(ActionKind kind) noexcept {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput || kind == ActionKind::kBackwardWeight;
}

bool is_message(ActionKind kind) noexcept {
  return is_send(kind) || kind == ActionKind::kRecvForward || kind == ActionKind::kRecvBackward;
}

bool is_send(ActionKind kind) noexcept {
  return kind == ActionKind::kSendForward || kind == ActionKind::kSendBackward;
}

bool is_vocabulary(ActionKind kind) noexcept {
  return kind >= ActionKind::kVocabInput && kind <= ActionKind::kVocabInputGradient;
}

bool has_its_numbers(const Action& action) noexcept {
  const bool chunk = action.chunk >= 0;
  const bool micro_batch = action.micro_batch >= 0;
  switch (action.kind) {
    case ActionKind::kStep:
      return !chunk && !micro_batch;
    case ActionKind::kUnshard:
    case ActionKind::kReshard:
    case ActionKind::kReduce:
      return chunk && !micro_batch;
    case ActionKind::kFetch:
    case ActionKind::kFlush:
      return chunk;
    case ActionKind::kVocabInput:
    case ActionKind::kVocabScores:
    case ActionKind::kVocabSum:
    case ActionKind::kVocabGradients:
    case ActionKind::kVocabInputGradient:
      return !chunk && micro_batch;
    default:
      return chunk && micro_batch;
  }
}

}  // namespace zeroth
