// Adds up where a rank's time of a step goes, for StepTimes.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/rank_activity.h>
#include <zeroth/engine/step_result.h>

#include <chrono>
#include <cstdint>

namespace zeroth {

/// Not for several threads at once: a step has one phase at a time. Two looks at a clock a turn; none while
/// the phase stays.
class PhaseClock {
 public:
  /// The rank enters a phase. `waited`: all its waits so far. Calls of all ranks belong to the phase in which
  /// they are made.
  void turn(Phase phase, std::chrono::nanoseconds waited) noexcept {
    std::int64_t StepTimes::* const part = part_of(phase);
    if (part == nullptr || part == part_) return;
    charge(waited);
    part_ = part;
  }
  /// The times since the last take(); the phase goes on.
  [[nodiscard]] StepTimes take(std::chrono::nanoseconds waited) noexcept;

 private:
  [[nodiscard]] static std::int64_t StepTimes::* part_of(Phase phase) noexcept;
  void charge(std::chrono::nanoseconds waited) noexcept;

  StepTimes times_{};
  std::int64_t StepTimes::* part_ = &StepTimes::between_us;
  SteadyClock::time_point charged_at_ = SteadyClock::now();
  std::chrono::nanoseconds waited_before_{0};  ///< when it was
};

}  // namespace zeroth
