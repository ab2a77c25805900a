#include "libtorch/step_log.h"

#include <chrono>
#include <cstdio>
#include <string_view>

namespace zeroth::libtorch {

void StepLog::report(const StepResult& result) {
  const auto now = SteadyClock::now();
  const auto seconds = [](auto duration) { return std::chrono::duration<double>(duration).count(); };
  log_.record("step", {{"step", result.step},
                       {"committed", result.committed},
                       {"delayed", result.delayed},
                       {"reason", std::string_view(result.reason)},
                       {"grad_norm", result.grad_norm},
                       {"clip_coefficient", result.clip_coefficient},
                       {"lr", result.lr},
                       {"loss_scale", result.loss_scale},
                       {"seconds", seconds(now - stepped_at_)}});
  stepped_at_ = now;
  if (every_.count() == 0 || now - reported_at_ < every_) return;
  char line[160];
  std::snprintf(line, sizeof line, "step %lld: gradient norm %.4g, lr %.4g, %.3g steps/s",
                static_cast<long long>(result.step), result.grad_norm, result.lr,
                static_cast<double>(result.step - reported_step_) / seconds(now - reported_at_));
  log_.progress(line);
  reported_at_ = now;
  reported_step_ = result.step;
}

}  // namespace zeroth::libtorch
