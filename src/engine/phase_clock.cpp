#include "engine/phase_clock.h"

#include <algorithm>
#include <utility>

namespace zeroth {
namespace {

std::int64_t microseconds_of(std::chrono::nanoseconds time) {
  return std::max<std::int64_t>(0, time.count() / 1'000);
}

}  // namespace

std::int64_t StepTimes::* PhaseClock::part_of(Phase phase) noexcept {
  switch (phase) {
    case Phase::kForward:
    case Phase::kEvaluation:
      return &StepTimes::forward_us;
    case Phase::kBackward:
    case Phase::kAfterBackward:
      return &StepTimes::backward_us;
    case Phase::kStep:
      return &StepTimes::step_us;
    case Phase::kStarting:
    case Phase::kBetweenSteps:
      return &StepTimes::between_us;
    case Phase::kSyncPoint:
      break;
  }
  return nullptr;
}

void PhaseClock::charge(std::chrono::nanoseconds waited) noexcept {
  const auto now = SteadyClock::now();
  const std::chrono::nanoseconds waits = waited - std::exchange(waited_before_, waited);
  times_.*part_ += microseconds_of(now - std::exchange(charged_at_, now) - waits);
  times_.waited_us += microseconds_of(waits);
}

StepTimes PhaseClock::take(std::chrono::nanoseconds waited) noexcept {
  charge(waited);
  return std::exchange(times_, {});
}

}  // namespace zeroth
