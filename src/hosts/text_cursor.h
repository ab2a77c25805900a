// Reads a text of a strict grammar from left to right and says where it stopped.
#pragma once

#include <zeroth/base/error.h>

#include <cstddef>
#include <string>
#include <string_view>

namespace zeroth {

/// At most 40 bytes of a text from outside in quotes, what is not printable as \xNN.
[[nodiscard]] std::string in_quotes(std::string_view text);

/// One line, and the place in it. Does not own the text.
class TextCursor {
 public:
  /// `name`, `line`: of the source, for messages. `code`: of the errors that `refuse` throws.
  TextCursor(std::string_view text, std::string name, std::size_t line, ErrorCode code)
      : text_(text), name_(std::move(name)), line_(line), code_(code) {}

  [[nodiscard]] bool at_end() const { return at_ == text_.size(); }
  [[nodiscard]] std::size_t column() const { return at_ + 1; }
  /// The rest.
  [[nodiscard]] std::string_view rest() const { return text_.substr(at_); }
  /// Skips one character if it is `c`.
  bool take(char c);
  /// Skips `word` if it is next.
  bool take(std::string_view word);
  void skip_blanks();
  /// Up to the first of `stops`, or the end.
  std::string_view until(std::string_view stops);
  /// A number without sign or leading zero from `low` to `high`; refuses anything else, up to the first of
  /// `stops`, with `hint`.
  int number(int low, int high, std::string_view stops, const std::string& what, const std::string& hint);
  /// A host: a name, or an IPv6 address, in brackets where `stops` has a ':'. Refuses what is neither.
  std::string host(std::string_view stops);

  /// Throws. `column` 0: here. Every refusal has a hint: what to do about it.
  [[noreturn]] void refuse(const std::string& message, const std::string& expected, std::string_view got,
                           const std::string& hint, std::size_t column = 0) const;

 private:
  std::string_view text_;
  std::size_t at_ = 0;
  std::string name_;
  std::size_t line_;
  ErrorCode code_;
};

}  // namespace zeroth
