// GradientGuards: what stands in `.grad` while the gradients are in the engine.
#pragma once

#include "libtorch/slots.h"

#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace zeroth::libtorch {

class GradientGuards {
 public:
  /// All of them outlive this; `trainable` may still grow until make().
  GradientGuards(const ParameterSlots& slots, const ModelDescription& model, const std::vector<int>& trainable)
      : slots_(slots), model_(model), trainable_(trainable) {}

  /// Without it there are none.
  void make();
  /// `.grad` of all trainable parameters: guards.
  void set();
  /// Throws kUsage if somebody took guards away: module.zero_grad(), `.grad = None`.
  void require_there() const;
  /// `.grad` of all trainable parameters: undefined.
  void clear();

 private:
  const ParameterSlots& slots_;
  const ModelDescription& model_;
  const std::vector<int>& trainable_;
  std::vector<at::Tensor> guards_;    // one a trainable parameter, or none
  std::vector<std::size_t> guarded_;  // those whose `.grad` is a guard now
};

}  // namespace zeroth::libtorch
