// Holds what hosts have to say for a moment, so that what many of them say is written once.
#pragma once

#include "launcher/said_once.h"

#include <zeroth/base/deadline.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// Notes leave as "host a: text", "hosts a, b: text", "hosts a, b, c, d and 121 more: text", in the order in which each
/// was said first.
class HostNotes {
 public:
  using TimePoint = SteadyClock::time_point;

  void add(const std::string& host, std::string_view text, TimePoint now);
  /// Those that have waited for kNoteWindow, and of very many the first.
  [[nodiscard]] std::vector<std::string> take(TimePoint now);
  /// When take() has something next; none if nothing waits.
  [[nodiscard]] std::optional<TimePoint> next() const { return waiting_.next(); }

 private:
  SaidOnce<std::string> waiting_;
};

inline constexpr Milliseconds kNoteWindow{300};  ///< a hundred hosts begin within it

}  // namespace zeroth::launcher
