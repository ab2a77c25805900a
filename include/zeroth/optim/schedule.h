// Learning-rate schedules: pure functions of the number of committed steps.
#pragma once

#include <cstdint>
#include <string_view>

namespace zeroth {

/// Multiplies the learning rate of each group: lr(t) = group.lr * factor(t).
struct LearningRateSchedule {
  enum class Kind : std::uint8_t {
    kConstant,
    kWarmup,        ///< rises from warmup_start to 1 over warmup_steps, then stays
    kWarmupLinear,  ///< ... then falls in a straight line to 0 at total_steps
    kWarmupCosine,  ///< ... then half a cosine down to `floor` at total_steps. Ref: Loshchilov, Hutter: SGDR, arXiv 1608.03983
  };
  Kind kind = Kind::kConstant;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;
  double warmup_start = 0.0;    ///< factor at step 0
  bool logarithmic = false;     ///< warm up along log(t + 1) / log(warmup_steps) instead of a line
  double floor = 0.0;           ///< smallest factor of the cosine

  /// Factor of the (t + 1)-th update, t committed before it.
  [[nodiscard]] double factor(std::int64_t t) const;
  bool operator==(const LearningRateSchedule&) const = default;
};

[[nodiscard]] std::string_view name_of(LearningRateSchedule::Kind kind) noexcept;

}  // namespace zeroth
