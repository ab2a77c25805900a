// Finds what a rank said about its end in one line of its output.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace zeroth::launcher {

/// An error of Zeroth in a line.
struct ErrorMark {
  std::size_t begin = 0;    ///< where its text begins
  std::string_view code{};  ///< "PEER_LOST"; points into the line
};

/// "ZEROTH ERROR [CODE] ..." of a native program, anywhere in the line, whatever the code; or the last line of a Python
/// traceback, "zeroth.Error: [CODE] ..." or (through torch) "RuntimeError: [CODE] ...", if Zeroth has such a code.
[[nodiscard]] std::optional<ErrorMark> find_error_mark(std::string_view line) noexcept;

}  // namespace zeroth::launcher
