// Waiting for what tells nobody: a device, a library.
#pragma once

#include <zeroth/base/deadline.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace zeroth::detail {

/// Calls look() until it says true: for 50 us without a pause, then with pauses of a 16th of the time waited, 10 us to
/// 1 ms. So it comes at most 6 % late. False after `slice`. Throws what look() throws.
template <class Look>
[[nodiscard]] bool poll_for(Milliseconds slice, const Look& look) {
  constexpr std::chrono::nanoseconds kBusy{50'000};
  constexpr std::chrono::nanoseconds kShortestPause{10'000};
  constexpr std::chrono::nanoseconds kLongestPause{1'000'000};
  const auto begin = SteadyClock::now();
  while (true) {
    if (look()) return true;
    const std::chrono::nanoseconds waited = SteadyClock::now() - begin;
    if (waited >= slice) return false;
    if (waited < kBusy) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::clamp(waited / 16, kShortestPause, kLongestPause));
    }
  }
}

}  // namespace zeroth::detail
