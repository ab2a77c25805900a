// Fused SGD with momentum: unscale, L2 weight decay, momentum and update in one pass over memory.
//
// Ref: Sutskever et al.: On the importance of initialization and momentum in deep learning, ICML 2013, in
// torch.optim.SGD's form:
//   g'  = factor * g + weight_decay * p
//   b   = g' on the first step, else momentum * b + (1 - dampening) * g'        (only if momentum != 0)
//   d   = g' + momentum * b if nesterov, else b; g' without momentum
//   p   = p - lr * d
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

struct SgdHyper {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  double factor = 1.0;      ///< turns the accumulated sum into the gradient
  bool first_step = false;  ///< the momentum buffer is not yet set: it becomes g'
};

/// One range of n elements. The arrays do not overlap; param and momentum are updated in place. Pointers need the
/// alignment of their type.
struct SgdArgs {
  void* param = nullptr;        ///< [n] of `dtype`; with `low` [n] BFloat16, with `master` [n] Float16
  std::int16_t* low = nullptr;  ///< [n] or null: lower halves of the masters of bf16 parameters (dtype kFloat32)
  float* master = nullptr;      ///< [n] or null: whole masters of fp16 parameters (dtype kFloat32)
  void* momentum = nullptr;     ///< [n] of `dtype`; may be null if hyper.momentum == 0; not read on the first step
  const void* grad = nullptr;   ///< [n] of `dtype`: the accumulated sum, not yet scaled
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;  ///< kFloat32 or kFloat64
  SgdHyper hyper{};               ///< each number is rounded once to `dtype`
};

/// Updates the range on the calling thread. Memory traffic in fp32: 20 B per element with momentum, 12 B without. The
/// bits do not depend on the split of a range into calls, on `isa`, or on the storage of masters in two halves. A NaN
/// result is the positive quiet NaN. Throws Error{kUsage} for another dtype, low with kFloat64, momentum without a
/// buffer, n < 0, or an unsupported isa.
void sgd_step(const SgdArgs& args, Isa isa);

}  // namespace zeroth::kernels
