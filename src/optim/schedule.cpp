#include <zeroth/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zeroth {

std::string_view name_of(LearningRateSchedule::Kind kind) noexcept {
  switch (kind) {
    case LearningRateSchedule::Kind::kConstant: return "constant";
    case LearningRateSchedule::Kind::kWarmup: return "warmup";
    case LearningRateSchedule::Kind::kWarmupLinear: return "warmup-linear";
    case LearningRateSchedule::Kind::kWarmupCosine: return "warmup-cosine";
  }
  return "constant";
}

double LearningRateSchedule::factor(std::int64_t t) const {
  if (kind == Kind::kConstant) return 1.0;
  if (t < warmup_steps) {
    double rise = static_cast<double>(t + 1) / static_cast<double>(warmup_steps);
    if (logarithmic && warmup_steps > 1) {
      rise = std::log(static_cast<double>(t + 1)) / std::log(static_cast<double>(warmup_steps));
    }
    return warmup_start + (1.0 - warmup_start) * rise;
  }
  if (kind == Kind::kWarmup) return 1.0;
  const auto span = static_cast<double>(std::max<std::int64_t>(1, total_steps - warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(t - warmup_steps) / span);
  if (kind == Kind::kWarmupLinear) return 1.0 - progress;
  return floor + (1.0 - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace zeroth
