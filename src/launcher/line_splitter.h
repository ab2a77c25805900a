// Cuts the byte stream of one rank into lines, puts a prefix before each, and remembers the last error line.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace zeroth::launcher {

/// Longest line that is kept in one piece, without its end.
inline constexpr std::size_t kMaxLineBytes = std::size_t{64} << 10;

/// What stands around a rank's lines.
struct LineStyle {
  std::string prefix{};                                ///< before every line
  bool pass_through = false;                           ///< bytes leave as they came, at once (one rank, no prefix)
  std::function<void(std::string_view line)> taker{};  ///< gets each line with its end, instead of the output
};

/// A line ends with LF, CR LF, or a CR that no LF follows (progress bars). Every byte of the input leaves in
/// order; what is added is the prefix, and an LF after a piece of kMaxLineBytes and after a last line that
/// has none.
class LineSplitter {
 public:
  explicit LineSplitter(LineStyle style) : style_(std::move(style)) {}

  /// Appends the lines that `bytes` completes to `out`.
  void feed(std::string_view bytes, std::string& out);
  /// The stream has ended: appends what is left.
  void finish(std::string& out);

  /// The last line that held an error of Zeroth (error_line.h), from there on, control characters replaced, at
  /// most 1,000 bytes.
  [[nodiscard]] const std::string& last_error_line() const { return last_error_line_; }
  /// The last line with more than blanks, likewise, at most 300 bytes.
  [[nodiscard]] const std::string& last_line() const { return last_line_; }
  /// A line held `kMakesRoom` (zeroth/base/preemption.h).
  [[nodiscard]] bool makes_room() const { return makes_room_; }

 private:
  void emit(std::string& out);

  LineStyle style_;
  std::string pending_;
  std::string last_error_line_;
  std::string last_line_;
  bool makes_room_ = false;
};

}  // namespace zeroth::launcher
