// What part_of_loss() does to gradients, without a group.
#pragma once

#include <ATen/core/Tensor.h>

namespace zeroth::libtorch {

/// The same value; its gradient is divided by `parts`, 1 or more.
[[nodiscard]] at::Tensor with_part_of_gradient(const at::Tensor& term, int parts);

}  // namespace zeroth::libtorch
