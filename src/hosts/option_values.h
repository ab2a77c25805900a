// Single values of the command line, from text.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/error.h>

#include <string>

namespace zeroth {

/// Throws Error(kUsage); the hint is --help if `context` has none.
[[noreturn]] void refuse_usage(const std::string& message, ErrorContext context = {});

/// What CLI11 says of an option without its value or with too many, in words for a user.
[[nodiscard]] std::string in_our_words(const std::string& text);

/// These throw Error(kUsage) that names the option.
[[nodiscard]] int parse_integer(const char* option, const std::string& text, int low, int high,
                                const std::string& what);
[[nodiscard]] Milliseconds parse_seconds(const char* option, const std::string& text);
/// A path that a remote shell leaves alone: letters, digits and ._+/-, not '-' first.
[[nodiscard]] std::string parse_remote_program(const std::string& text);

struct Endpoint {
  std::string host{};  ///< name or address, IPv6 without brackets
  int port = 0;

  bool operator==(const Endpoint&) const = default;
};
/// HOST:PORT or [IPv6]:PORT.
[[nodiscard]] Endpoint parse_endpoint(const char* option, const std::string& text);

}  // namespace zeroth
