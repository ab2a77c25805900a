// The update of Adam's family: AdamW's kernel on a block whose first two states are the moments.
#pragma once

#include <zeroth/optim/optimizer.h>

namespace zeroth {

/// Of a block, with decoupled weight decay.
[[nodiscard]] inline kernels::AdamWHyper adam_hyper(const StepBlock& block) {
  return {.lr = block.hyper.lr,
          .beta1 = block.hyper.beta1,
          .beta2 = block.hyper.beta2,
          .eps = block.hyper.eps,
          .weight_decay = block.hyper.weight_decay,
          .factor = block.factor,
          .step = block.step};
}

inline void adam_step(const StepBlock& block, const kernels::AdamWCoefficients& coefficients, Kernels& kernels,
                      const Stream& stream) {
  kernels.adamw({.param = block.param,
                 .low = block.low,
                 .master = block.master,
                 .exp_avg = block.states[0],
                 .exp_avg_sq = block.states[1],
                 .grad = block.grad,
                 .n = block.n,
                 .dtype = block.dtype,
                 .coefficients = coefficients},
                stream);
}
inline void adam_step(const StepBlock& block, const kernels::AdamWHyper& hyper, Kernels& kernels,
                      const Stream& stream) {
  adam_step(block, zeroth::kernels::adamw_coefficients(hyper), kernels, stream);
}

}  // namespace zeroth
