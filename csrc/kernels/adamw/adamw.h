// Fused Adam / AdamW: unscale, weight decay, moments and update in one pass over memory.
//
// Ref: Kingma, Ba: Adam, arXiv 1412.6980, Algorithm 1. Loshchilov, Hutter: Decoupled Weight Decay
// Regularization, arXiv 1711.05101, Algorithm 2. With g the accumulated gradient and t = step (first step:
// 1), for every element:
//   g'  = factor * g                                    (+ weight_decay * p, if not decoupled)
//   p   = p * (1 - lr * weight_decay)                   (decoupled only)
//   m   = m + (1 - beta1) * (g' - m)
//   v   = beta2 * v + (1 - beta2) * g'^2
//   p   = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// Without a gradient (1-bit Adam: Tang et al., ICML 2021, whose ranks bring m by themselves) m and v stay, and
//   p   = p * (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps),  0 where v is 0
// with s the step in which v was made. Where v is 0 there has never been a gradient, and m is nothing but rounding.
// These are torch.optim.AdamW's (Adam's) formulas; results agree with them to rounding, not to the bit.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// Hyper-parameters of one step, as the user sets them.
struct AdamWHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;  ///< AdamW if true; else weight_decay is added to the gradient (Adam with L2)
  double factor = 1.0;    ///< turns the accumulated sum into the gradient: clip / (ranks * micro_steps * weights)
  std::int64_t step = 1;  ///< >= 1
  std::int64_t variance_step = 0;  ///< of v, if that is older; 0: step
};

/// Coefficients of the kernel. Computed once per step in double; each is rounded once to the dtype of the state.
struct AdamWCoefficients {
  double factor = 1.0;
  double l2 = 0.0;     ///< weight decay added to the gradient
  double decay = 1.0;  ///< 1 - lr * weight_decay, or 1
  double one_minus_beta1 = 0.0;
  double beta2 = 0.0;
  double one_minus_beta2 = 0.0;
  double inv_sqrt_correction2 = 1.0;  ///< 1 / sqrt(1 - beta2^t)
  double eps = 0.0;
  double step_size = 0.0;  ///< lr / (1 - beta1^t)
};

[[nodiscard]] AdamWCoefficients adamw_coefficients(const AdamWHyper& hyper) noexcept;

/// One range of n elements. The arrays do not overlap; param, exp_avg and exp_avg_sq are updated in place. Pointers
/// need the alignment of their type; multiples of 64 bytes are fast.
struct AdamWArgs {
  void* param = nullptr;        ///< [n] of `dtype`; with `low` [n] BFloat16, with `master` [n] Float16
  std::int16_t* low = nullptr;  ///< [n] or null: lower halves of the masters of bf16 parameters (dtype kFloat32)
  float* master = nullptr;      ///< [n] or null: whole masters of fp16 parameters (dtype kFloat32)
  void* exp_avg = nullptr;      ///< [n] of `dtype`: m
  void* exp_avg_sq = nullptr;   ///< [n] of `dtype`: v
  const void* grad = nullptr;   ///< [n] of `dtype`: the accumulated sum, not yet scaled; null: m and v stay
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< kFloat32 or kFloat64
  AdamWCoefficients coefficients{};
};

/// Updates the range on the calling thread. Memory traffic: 28 B per element in fp32, 56 B in fp64, without a gradient
/// 16 B and 32 B. The bits do not
/// depend on the split of a range into calls, on `isa`, or on the storage of masters in two halves. A NaN result is the
/// positive quiet NaN. Throws Error{kUsage} for another dtype, low with kFloat64, n < 0, or an unsupported isa.
void adamw_step(const AdamWArgs& args, Isa isa);

}  // namespace zeroth::kernels
