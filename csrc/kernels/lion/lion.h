// Fused Lion: unscale, sign of the interpolated momentum, decoupled weight decay and update in one pass over memory.
//
// Ref: Chen et al.: Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, arXiv 2302.06675, algorithm 2:
//   g = factor * sum
//   c = m + (1 - beta1) * (g - m)
//   p = p * (1 - lr * weight_decay) - lr * sign(c)        sign(0) = 0
//   m = m + (1 - beta2) * (g - m)
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

struct LionHyper {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  double factor = 1.0;  ///< turns the accumulated sum into the gradient
};

/// One range of n elements. The arrays do not overlap; param and exp_avg are updated in place. Pointers need the
/// alignment of their type.
struct LionArgs {
  void* param = nullptr;        ///< [n] of `dtype`; with `low` [n] BFloat16, with `master` [n] Float16
  std::int16_t* low = nullptr;  ///< [n] or null: lower halves of the masters of bf16 parameters (dtype kFloat32)
  float* master = nullptr;      ///< [n] or null: whole masters of fp16 parameters (dtype kFloat32)
  void* exp_avg = nullptr;      ///< [n] of `dtype`: m
  const void* grad = nullptr;   ///< [n] of `dtype`: the accumulated sum, not yet scaled
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< kFloat32 or kFloat64
  LionHyper hyper{};              ///< what is derived of it is rounded once to `dtype`
};

/// Updates the range on the calling thread. Memory traffic in fp32: 20 B per element. The bits do not depend on the
/// split of a range into calls, on `isa`, or on the storage of masters. A NaN result is the positive quiet NaN. Throws
/// Error{kUsage} for another dtype, masters with kFloat64, two kinds of them, n < 0, or an unsupported isa.
void lion_step(const LionArgs& args, Isa isa);

}  // namespace zeroth::kernels
