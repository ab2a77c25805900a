// Fused LAMB, in two passes: the direction of a step has the length of the parameter, which needs all of both first.
//
// Ref: You et al.: Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, arXiv
// 1904.00962, Algorithm 2. With g the accumulated gradient and t = step (first step: 1), for every element of a tensor:
//   m  = m + (1 - beta1) * (factor * g - m)
//   v  = beta2 * v + (1 - beta2) * (factor * g)^2
//   u  = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * p        (the first summand 0 where v
//   is 0) p  = p - step_size * u,   step_size = lr * |p| / |u|, which the caller limits
// lamb_measure() is the first three lines, and sums of squares of p and u. lamb_apply() is the last two.
//
// Without a gradient (1-bit LAMB: Li et al.: 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
// LAMB's Convergence Speed, HiPC 2022, arXiv 2104.06069) ranks bring m by themselves, v is that of step s and stays,
// and the measure is how far v would have come with the gradients that are in m:
//   g' = (m - beta1 * last) / (1 - beta1);   last = m
//   fresh = beta2 * fresh + (1 - beta2) * g'^2
//   r  = (sqrt(v) / sqrt(1 - beta2^s) + eps) / (sqrt(fresh) / sqrt(1 - beta2^t) + eps)    (0 where v is 0)
#pragma once

#include <kernels/adamw/adamw.h>
#include <kernels/common/dispatch.h>
#include <kernels/norm/norm.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

/// Hyper-parameters of one step, as the user sets them.
struct LambHyper {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool bias_correction = true;     ///< false: the powers of beta1 and beta2 above count as 0
  double factor = 1.0;             ///< turns the accumulated sum into the gradient
  std::int64_t step = 1;           ///< >= 1
  std::int64_t variance_step = 0;  ///< of v, if that is older; 0: step
};

/// Coefficients of the kernels. Computed once per step in double; each is rounded once to the dtype of the state.
struct LambCoefficients {
  AdamWCoefficients adam{};  ///< of the moments; step_size is that of lamb_apply()
  double beta1 = 0.0;
  double inv_one_minus_beta1 = 1.0;
  double inv_correction1 = 1.0;       ///< 1 / (1 - beta1^t)
  double inv_sqrt_correction2 = 1.0;  ///< 1 / sqrt(1 - beta2^t), of what is fresh
  double weight_decay = 0.0;
};

/// step_size is 0 in it.
[[nodiscard]] LambCoefficients lamb_coefficients(const LambHyper& hyper) noexcept;

/// One range of n elements. The arrays do not overlap. Pointers need the alignment of their type.
struct LambArgs {
  void* param = nullptr;        ///< [n] of `dtype`; with `low` [n] BFloat16, with `master` [n] Float16
  std::int16_t* low = nullptr;  ///< [n] or null: lower halves of the masters of bf16 parameters (dtype kFloat32)
  float* master = nullptr;      ///< [n] or null: whole masters of fp16 parameters (dtype kFloat32)
  void* exp_avg = nullptr;      ///< [n] of `dtype`: m
  void* exp_avg_sq = nullptr;   ///< [n] of `dtype`: v
  void* last = nullptr;         ///< [n] of `dtype`, or null: a copy of m; without a gradient that of the step before
  void* fresh = nullptr;        ///< [n] of `dtype`, null if `last` is: a copy of v; without a gradient see above
  const void* grad = nullptr;   ///< [n] of `dtype`: the accumulated sum, not yet scaled; null: ranks have brought m
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< kFloat32 or kFloat64
  LambCoefficients coefficients{};
  /// Of each block of kNormBlock elements from the first one on; the last may be short. [ceil(n / kNormBlock)].
  double* param_squares = nullptr;   ///< of p, as in norm.h; not written without a gradient
  double* update_measure = nullptr;  ///< the same of u; without a gradient the greatest r, and 0 for NaN
};

/// The first pass over the range, on the calling thread: updates m and v, or `last` and `fresh`, and measures. Memory
/// traffic in fp32: 24 B per element, with `last` 32 B, without a gradient 24 B. The bits do not depend on `isa`, on
/// the storage of masters, or on a split at multiples of kNormBlock. Throws Error{kUsage} for another dtype, low with
/// kFloat64, n < 0, neither a gradient nor `last`, or an unsupported isa.
void lamb_measure(const LambArgs& args, Isa isa);

/// The second pass: p alone changes. Reads m and v; 16 B per element in fp32. Any split gives the same bits.
void lamb_apply(const LambArgs& args, Isa isa);

}  // namespace zeroth::kernels
