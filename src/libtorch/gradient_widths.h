// GradientWidths: in which dtype torch sums the gradients of 16-bit parameters.
#pragma once

#include "libtorch/slots.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace zeroth::libtorch {

/// How many edges of a graph lead to each accumulator of a parameter.
using GradientUses = std::unordered_map<const torch::autograd::Node*, int>;

class GradientWidths {
 public:
  /// `slots` outlive this.
  explicit GradientWidths(const ParameterSlots& slots) : slots_(slots) {}

  /// A trainable 16-bit parameter. Wide from now on.
  void add(int param);
  /// False: there is nothing to choose.
  [[nodiscard]] bool any() const { return !narrow_.empty(); }
  /// Those whose gradient is no sum in this backward: it comes as it was computed. `of_graph`: edges of the graph whose
  /// backward it is, where others wait for theirs; null: those of all graphs count.
  void choose(const GradientUses* of_graph = nullptr);
  void widen_all();
  /// The user's own dtypes.
  void restore();
  /// Graph task in which uses were counted last, -1.
  [[nodiscard]] int counted_in() const { return counted_in_; }

 private:
  struct Narrow {
    int param;
    std::optional<at::ScalarType> grad_dtype;  // the user's
  };
  const ParameterSlots& slots_;
  std::vector<Narrow> narrow_;
  int counted_in_ = -1;
};

}  // namespace zeroth::libtorch
