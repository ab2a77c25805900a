// What LAMB and 1-bit LAMB share: their kernels' arguments for a block, and the trust ratio.
#pragma once

#include <zeroth/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

namespace zeroth {

/// Of a block whose first two states are the moments. `variance_step`: of the second, if that is older.
[[nodiscard]] inline kernels::LambArgs lamb_args(const StepBlock& block, const LambOptions& options,
                                                 std::int64_t variance_step = 0) {
  kernels::LambArgs args{.param = block.param,
                         .low = block.low,
                         .master = block.master,
                         .exp_avg = block.states[0],
                         .exp_avg_sq = block.states[1],
                         .grad = block.grad,
                         .n = block.n,
                         .dtype = block.dtype,
                         .coefficients = zeroth::kernels::lamb_coefficients({.beta1 = block.hyper.beta1,
                                                                             .beta2 = block.hyper.beta2,
                                                                             .eps = block.hyper.eps,
                                                                             .weight_decay = block.hyper.weight_decay,
                                                                             .bias_correction = options.bias_correction,
                                                                             .factor = block.factor,
                                                                             .step = block.step,
                                                                             .variance_step = variance_step})};
  args.coefficients.adam.step_size = block.hyper.lr * block.scale;
  return args;
}

/// Norm of a tensor by norm of its direction, between both limits; 1 where one of them is 0 or not a number.
[[nodiscard]] inline double trust_ratio(std::span<const double> norms, const LambOptions& options) {
  const bool is_ratio = norms[0] > 0.0 && norms[1] > 0.0 && std::isfinite(norms[0]) && std::isfinite(norms[1]);
  return is_ratio ? std::clamp(norms[0] / norms[1], options.min_coeff, options.max_coeff) : 1.0;
}

}  // namespace zeroth
