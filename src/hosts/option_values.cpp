#include "hosts/option_values.h"

#include "hosts/text_cursor.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace zeroth {

void refuse_usage(const std::string& message, ErrorContext context) {
  if (context.hint.empty()) {
    context.hint = "zeroth-run --help";
  }
  throw Error(ErrorCode::kUsage, message, std::move(context));
}

std::string in_our_words(const std::string& text) {
  const std::string option = text.substr(0, text.find(':'));
  if (text.find(": At Most 1 required but received ") != std::string::npos) return option + " was given more than once";
  if (text.find(": 1 required ") != std::string::npos && text.ends_with(" missing")) return option + " has no value";
  return text;
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

}  // namespace zeroth
