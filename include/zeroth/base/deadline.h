// Deadlines: every wait in Zeroth has one, and checks its conditions at least every 100 ms.
#pragma once

#include <algorithm>
#include <chrono>

namespace zeroth {

using SteadyClock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// Longest sleep of a wait without a check of other ranks, abort flags and signals.
inline constexpr Milliseconds kWaitSlice{100};

/// The point in time after which a wait is an error. A value; cheap to copy.
class Deadline {
 public:
  explicit Deadline(Milliseconds timeout) : timeout_(timeout), end_(SteadyClock::now() + timeout) {}

  [[nodiscard]] bool passed() const { return SteadyClock::now() >= end_; }
  [[nodiscard]] Milliseconds timeout() const { return timeout_; }
  [[nodiscard]] Milliseconds remaining() const {
    return std::max(Milliseconds{0}, std::chrono::duration_cast<Milliseconds>(end_ - SteadyClock::now()));
  }
  /// min(remaining, 100 ms), at least 1 ms.
  [[nodiscard]] Milliseconds slice() const { return std::clamp(remaining(), Milliseconds{1}, kWaitSlice); }

 private:
  Milliseconds timeout_;
  SteadyClock::time_point end_;
};

}  // namespace zeroth
