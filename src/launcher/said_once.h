// Texts that wait a moment, so that what several say alike leaves once.
#pragma once

#include <zeroth/base/deadline.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::launcher {

/// A queue of texts and of who has said each. What one of them says stays in order; between them a text may move up to
/// an equal one.
template <class Who>
class SaidOnce {
 public:
  using TimePoint = SteadyClock::time_point;
  struct Entry {
    std::string text;
    std::vector<Who> by;  ///< in the order in which they said it
    TimePoint due;        ///< of the first
  };

  /// True for a text of its own, false where it joins an equal one that waits.
  bool add(const Who& who, std::string_view text, TimePoint due) {
    auto from = waiting_.end();  // after everything that it has said before
    while (from != waiting_.begin() && std::ranges::find(std::prev(from)->by, who) == std::prev(from)->by.end()) --from;
    const auto same = std::find_if(from, waiting_.end(), [text](const Entry& entry) { return entry.text == text; });
    if (same != waiting_.end()) {
      same->by.push_back(who);
      return false;
    }
    waiting_.push_back({.text = std::string(text), .by = {who}, .due = due});
    return true;
  }

  [[nodiscard]] bool empty() const { return waiting_.empty(); }
  [[nodiscard]] std::size_t size() const { return waiting_.size(); }
  /// The first; there must be one.
  [[nodiscard]] const Entry& first() const { return waiting_.front(); }
  [[nodiscard]] Entry take_first() {
    Entry entry = std::move(waiting_.front());
    waiting_.pop_front();
    return entry;
  }
  /// When the first is due; none if nothing waits.
  [[nodiscard]] std::optional<TimePoint> next() const { return empty() ? std::nullopt : std::optional(first().due); }

 private:
  std::deque<Entry> waiting_;
};

}  // namespace zeroth::launcher
