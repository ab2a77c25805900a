#include "libtorch/step_log.h"

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

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
  const std::optional<ExpertsNote> experts = std::exchange(experts_, std::nullopt);
  if (experts)
    log_.record("experts", {{"step", result.step},
                            {"entropy", experts->entropy},
                            {"layer", std::string_view(experts->layer)},
                            {"dropped", experts->dropped}});
  if (every_.count() == 0 || now - reported_at_ < every_) return;
  char line[160];
  std::snprintf(line, sizeof line, "step %lld: gradient norm %.4g, lr %.4g, %.3g steps/s",
                static_cast<long long>(result.step), result.grad_norm, result.lr,
                static_cast<double>(result.step - reported_step_) / seconds(now - reported_at_));
  std::string text = line;
  if (experts) {
    std::snprintf(line, sizeof line, ", experts least even %.3f, %lld dropped", experts->entropy,
                  static_cast<long long>(experts->dropped));
    text += line;
  }
  log_.progress(text);
  reported_at_ = now;
  reported_step_ = result.step;
}

}  // namespace zeroth::libtorch
