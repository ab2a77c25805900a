#include <zeroth/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zeroth {

std::string_view name_of(LearningRateSchedule::Kind kind) noexcept {
  switch (kind) {
    case LearningRateSchedule::Kind::kConstant:
      return "constant";
    case LearningRateSchedule::Kind::kWarmup:
      return "warmup";
    case LearningRateSchedule::Kind::kWarmupLinear:
      return "warmup-linear";
    case LearningRateSchedule::Kind::kWarmupCosine:
      return "warmup-cosine";
  }
  return "constant";
}

double LearningRateSchedule::factor(std::int64_t t) const {
  if (kind == Kind::kConstant) return 1.0;
  const std::int64_t last = t - 1;  // index of the update before this one, -1 before the first
  const std::int64_t warmup = warmup_steps == 0 ? 0 : std::max<std::int64_t>(2, warmup_steps);
  if (last < warmup) {
    if (warmup == 0) return 1.0;
    if (last < 0) return warmup_start;
    const double rise = logarithmic ? std::log(static_cast<double>(last + 1)) / std::log(static_cast<double>(warmup))
                                    : static_cast<double>(last) / static_cast<double>(warmup);
    return warmup_start + (1.0 - warmup_start) * rise;
  }
  if (kind == Kind::kWarmup) return 1.0;
  const auto span = static_cast<double>(std::max<std::int64_t>(1, total_steps - warmup));
  if (kind == Kind::kWarmupLinear) return std::clamp(static_cast<double>(total_steps - last) / span, 0.0, 1.0);
  const double progress = std::min(1.0, static_cast<double>(last - warmup + 1) / span);
  return floor + (1.0 - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace zeroth
