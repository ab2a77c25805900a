// When 0/1 Adam updates variances, and when its ranks synchronise: pure functions of the number of the step.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <algorithm>
#include <cstdint>

namespace zeroth {

/// Updates of variances in steps 1 to `step`: in every step, after `var_update_scaler` of them in steps that are
/// multiples of 2, then of 4, and so on.
[[nodiscard]] inline std::int64_t variance_updates(const ZeroOneOptions& options, std::int64_t step) {
  std::int64_t before = 0;  // the last of the shorter intervals
  std::int64_t updates = 0;
  for (std::int64_t interval = 1; before < step; interval *= 2) {
    const std::int64_t first = (before / interval + 1) * interval;
    const std::int64_t last = first + (options.var_update_scaler - 1) * interval;
    const std::int64_t until = std::min(step, last);
    if (until >= first) updates += (until - first) / interval + 1;
    before = last;
  }
  return updates;
}

/// Step number `step`, from 1, before var_freeze_step: ranks sum their gradients, and variances change.
[[nodiscard]] inline bool updates_variance(const ZeroOneOptions& options, std::int64_t step) {
  return variance_updates(options, step) > variance_updates(options, step - 1);
}

/// Step number `step` after var_freeze_step: ranks synchronise at its end.
[[nodiscard]] inline bool synchronises(const ZeroOneOptions& options, std::int64_t step) {
  std::int64_t interval = 1;
  for (std::int64_t left = step - options.var_freeze_step - 1;
       left >= options.local_step_scaler && interval < options.local_step_clipper; left -= options.local_step_scaler) {
    interval = std::min(2 * interval, options.local_step_clipper);
  }
  return step % interval == 0;
}

}  // namespace zeroth
