// Waiting for what tells nobody: a device, a library.
#pragma once

#include <zeroth/base/deadline.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace zeroth::detail {

/// Calls look() until it says true: for 50 us without a pause, then with growing ones, at most 1 ms. False after
/// `slice`. Throws what look() throws.
template <class Look>
[[nodiscard]] bool poll_for(Milliseconds slice, const Look& look) {
  constexpr std::chrono::microseconds kBusy{50};
  constexpr std::chrono::microseconds kLongestPause{1'000};
  const auto begin = SteadyClock::now();
  for (std::chrono::microseconds pause{10};;) {
    if (look()) return true;
    const auto waited = SteadyClock::now() - begin;
    if (waited >= slice) return false;
    if (waited < kBusy) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
}

}  // namespace zeroth::detail
