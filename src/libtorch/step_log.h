// StepLog: the record of each step, and a line of progress from time to time.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/log.h>
#include <zeroth/engine/step_result.h>

#include <cstdint>

namespace zeroth::libtorch {

class StepLog {
 public:
  /// `log` outlives this.
  explicit StepLog(const Logger& log) : log_(log) {}

  /// A line at most so often; 0: none.
  void set_every(Milliseconds every) { every_ = every; }
  void report(const StepResult& result);

 private:
  const Logger& log_;
  Milliseconds every_{0};
  SteadyClock::time_point reported_at_ = SteadyClock::now();  // the last line of progress, or the beginning
  std::int64_t reported_step_ = 0;
  SteadyClock::time_point stepped_at_ = SteadyClock::now();
};

}  // namespace zeroth::libtorch
