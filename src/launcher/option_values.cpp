#include "launcher/option_values.h"

#include "launcher/messages.h"
#include "launcher/text_cursor.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

namespace zeroth::launcher {
namespace {

/// Variables that say who a rank is. A user's value would contradict what the launcher started.
constexpr std::array kOwned{"RANK",
                            "LOCAL_RANK",
                            "WORLD_SIZE",
                            "LOCAL_WORLD_SIZE",
                            "GROUP_RANK",
                            "GROUP_WORLD_SIZE",
                            "NODE_RANK",
                            "TORCHELASTIC_RUN_ID",
                            "TORCHELASTIC_RESTART_COUNT",
                            "TORCHELASTIC_MAX_RESTARTS",
                            "ZEROTH_BOUND_CORES",
                            "ZEROTH_JOB_ID",
                            "ZEROTH_RESTART_COUNT"};

}  // namespace

void refuse_usage(const std::string& message, ErrorContext context) {
  if (context.hint.empty()) {
    context.hint = "zeroth-run --help";
  }
  throw Error(ErrorCode::kUsage, message, std::move(context));
}

int parse_integer(const char* option, const std::string& text, int low, int high, const std::string& what) {
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    refuse_usage(what + " is not usable",
                 {.which = option, .expected = fmt::format("{} to {}", low, high), .got = fmt::format("'{}'", text)});
  }
  return value;
}

Milliseconds parse_seconds(const char* option, const std::string& text) {
  constexpr double kLongest = 365.0 * 24 * 3600;
  double seconds = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (status != std::errc{} || end != text.data() + text.size() || !std::isfinite(seconds) || seconds <= 0 ||
      seconds > kLongest) {
    refuse_usage("not a usable time",
                 {.which = option, .expected = "seconds above 0, at most a year", .got = fmt::format("'{}'", text)});
  }
  return Milliseconds{std::max<long long>(1, std::llround(seconds * 1000))};
}

std::pair<std::string, std::string> parse_assignment(const std::string& text) {
  const std::size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  if (equals == std::string::npos || !valid_variable_name(name)) {
    refuse_usage("not an environment assignment",
                 {.which = "--env",
                  .expected = "NAME=VALUE, NAME of letters, digits and _ that does not start with a digit",
                  .got = fmt::format("'{}'", text)});
  }
  if (std::find(kOwned.begin(), kOwned.end(), name) != kOwned.end()) {
    refuse_usage("this variable is set by zeroth-run itself, for each rank", {.which = name});
  }
  return {name, text.substr(equals + 1)};
}

std::string parse_remote_program(const std::string& text) {
  const bool plain = !text.empty() && text.front() != '-' && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("._+/-").find(c) != std::string_view::npos;
  });
  if (!plain) {
    refuse_usage(
        "not a path that every remote shell takes as it is",
        {.which = "--remote-program", .expected = "letters, digits and ._+/-, no '-' first", .got = in_quotes(text)});
  }
  return text;
}

Endpoint parse_endpoint(const char* option, const std::string& text) {
  TextCursor cursor(text, option, 1, ErrorCode::kUsage);
  Endpoint endpoint{.host = cursor.host(":")};
  if (!cursor.take(':'))
    cursor.refuse("the port is missing", "HOST:PORT", cursor.rest(),
                  "the same free port on all nodes, for example node0:29400");
  endpoint.port = cursor.number(1, 65'535, "", "the port", "the same free port on all nodes");
  return endpoint;
}

}  // namespace zeroth::launcher
