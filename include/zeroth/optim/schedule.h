// Learning-rate schedules: pure functions of the number of committed steps.
#pragma once

#include <cstdint>
#include <string_view>

namespace zeroth {

/// Multiplies the learning rate of each group: lr(t) = group.lr * factor(t).
///
/// The curves are those of training with DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR. DeepSpeed's schedulers
/// step after the optimizer. So update t (from 0) uses the value of iteration i = t - 1, and update 0 uses the start of
/// the warmup. With W = max(2, warmup_steps) and T = total_steps:
///   i < W      warmup_start + (1 - warmup_start) * (log(i + 1) / log(W), or i / W)
///   linear     max(0, (T - i) / (T - W))
///   cosine     floor + (1 - floor) * (1 + cos(pi * (i - W + 1) / (T - W))) / 2, and `floor` from T on
/// Differences from DeepSpeed: warmup_steps = 0 means no warmup, and the cosine does not rise again after T.
struct LearningRateSchedule {
  enum class Kind : std::uint8_t {
    kConstant,
    kWarmup,        ///< rises from warmup_start to 1 over warmup_steps, then stays
    kWarmupLinear,  ///< ... then falls in a straight line to 0
    kWarmupCosine,  ///< ... then half a cosine down to `floor`. Ref: Loshchilov, Hutter: SGDR, arXiv 1608.03983
  };
  Kind kind = Kind::kConstant;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;
  double warmup_start = 0.0;  ///< factor of the first update
  bool logarithmic = false;   ///< warm up along a logarithm instead of a line
  double floor = 0.0;         ///< smallest factor of the cosine

  /// Factor of the update after t committed updates.
  [[nodiscard]] double factor(std::int64_t t) const;
  bool operator==(const LearningRateSchedule&) const = default;
};

[[nodiscard]] std::string_view name_of(LearningRateSchedule::Kind kind) noexcept;

}  // namespace zeroth
