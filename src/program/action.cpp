#include <zeroth/base/error.h>
#include <zeroth/program/action.h>

#include <array>
#include <charconv>

namespace zeroth {
namespace {

constexpr std::array<std::string_view, 15> kNames{"F",      "B",      "I",      "W",         "SEND_F",
                                                  "RECV_F", "SEND_B", "RECV_B", "UNSHARD",   "RESHARD",
                                                  "REDUCE", "FETCH",  "FLUSH",  "RECOMPUTE", "STEP"};

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
    if (rest.empty() && to_text(action) == text) return action;
  }
  throw Error(ErrorCode::kUsage, "this is no action of a program",
              {.where = "program.action",
               .which = std::string(text),
               .expected = "a chunk, an action and a micro-batch, as 2F0, 2SEND_F0, 0UNSHARD or STEP"});
}

}  // namespace zeroth
