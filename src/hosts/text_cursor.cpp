#include "hosts/text_cursor.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace zeroth {
namespace {

constexpr std::size_t kMostQuoted = 40;
constexpr std::size_t kMaxHostBytes = 253;  // a name in the DNS
constexpr const char* kHostForm =
    "a name of letters, digits, '.', '-' and '_' that begins with a letter or digit, or an IPv6 address";

bool is_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool is_host_name(std::string_view text) {
  return !text.empty() && text.size() <= kMaxHostBytes && is_alphanumeric(text.front()) && text.back() != '.' &&
         text.find("..") == std::string_view::npos &&
         std::ranges::all_of(text, [](char c) { return is_alphanumeric(c) || c == '.' || c == '-' || c == '_'; });
}

/// Shortest form of an address; none if it is no address.
std::optional<std::string> ipv6(std::string_view text) {
  std::array<unsigned char, 16> address{};
  std::array<char, INET6_ADDRSTRLEN> shortest{};
  if (text.size() >= shortest.size() || ::inet_pton(AF_INET6, std::string(text).c_str(), address.data()) != 1 ||
      ::inet_ntop(AF_INET6, address.data(), shortest.data(), shortest.size()) == nullptr) {
    return std::nullopt;
  }
  return shortest.data();
}

}  // namespace

std::string in_quotes(std::string_view text) {
  std::string result = "'";
  for (const char c : text.substr(0, kMostQuoted)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte >= 0x20 && byte < 0x7f ? std::string(1, c) : fmt::format("\\x{:02x}", byte);
  }
  return result + (text.size() > kMostQuoted ? "'..." : "'");
}

bool TextCursor::take(char c) {
  const bool found = !at_end() && text_[at_] == c;
  at_ += found ? 1 : 0;
  return found;
}

bool TextCursor::take(std::string_view word) {
  const bool found = rest().starts_with(word);
  at_ += found ? word.size() : 0;
  return found;
}

void TextCursor::skip_blanks() {
  while (take(' ') || take('\t')) {
  }
}

std::string_view TextCursor::until(std::string_view stops) {
  const std::string_view found = rest().substr(0, rest().find_first_of(stops));
  at_ += found.size();
  return found;
}

int TextCursor::number(int low, int high, std::string_view stops, const std::string& what, const std::string& hint) {
  const std::size_t begin = column();
  const std::string_view text = until(stops);
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool plain =
      !text.empty() && text.front() >= '0' && text.front() <= '9' && (text.size() == 1 || text.front() != '0');
  if (!plain || status != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    refuse(what + " is not usable", fmt::format("{} to {}", low, high), text, hint, begin);
  }
  return value;
}

std::string TextCursor::host(std::string_view stops) {
  const std::size_t begin = column();
  if (take('[')) {
    const std::string_view text = until("]");
    const auto address = ipv6(text);
    if (!take(']') || !address)
      refuse("not an IPv6 address in brackets", "[address]", text, "brackets are for an address such as [fd00::7]",
             begin);
    return *address;
  }
  const std::string_view text = until(stops);
  if (is_host_name(text)) {
    return std::string(text);
  }
  const bool brackets_needed = stops.find(':') != std::string_view::npos;
  const auto address = ipv6(text);
  if (address && !brackets_needed) {
    return *address;
  }
  std::string hint = "the name or address that ssh takes, without a port";
  if (text.starts_with("slots=")) hint = "the host comes first: HOST slots=N";
  if (text.empty())
    hint = rest().starts_with(':') ? "an IPv6 address goes in brackets here: [fd00::7]" : "a host is missing here";
  if (text.find('%') != std::string_view::npos) hint = "an address with a zone is not taken; give the host a name";
  if (text.find('@') != std::string_view::npos) hint = "the user belongs into ssh's configuration (User)";
  if (text.starts_with('-')) hint = "a host never begins with '-': ssh would take it for an option";
  refuse("not a host", kHostForm, text, hint, begin);
}

void TextCursor::refuse(const std::string& message, const std::string& expected, std::string_view got,
                        const std::string& hint, std::size_t column) const {
  throw Error(code_, message,
              {.where = fmt::format("{}:{}:{}", name_, line_, column == 0 ? this->column() : column),
               .expected = expected,
               .got = in_quotes(got),
               .hint = hint});
}

}  // namespace zeroth
