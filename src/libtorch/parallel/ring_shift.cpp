#include "libtorch/parallel/group_call.h"
#include "libtorch/torch_versions.h"

#include <zeroth/libtorch/collectives.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

using torch::autograd::variable_list;

constexpr CallName kCallRingShift{.call = "ring_shift", .number = 9};

variable_list shift_tracked(const variable_list& tensors, int by, const RankGroup& group, bool is_backward);

/// Shifts gradients back. A gradient that is missing on this rank is zero: the other ranks wait for it.
class ShiftBack final : public torch::autograd::Node {
 public:
  ShiftBack(RankGroup group, int by) : group_(std::move(group)), by_(by) {}

  variable_list apply(variable_list&& gradients) override {
    for (std::size_t index = 0; index < gradients.size(); ++index) {
      if (!gradients[index].defined()) gradients[index] = at::zeros(like_[index].shape, like_[index].options);
    }
    return shift_tracked(gradients, -by_, group_, /*is_backward=*/true);
  }
  std::string name() const override { return "ZerothRingShiftBackward"; }
  void add_output(const at::Tensor& output) {
    like_.push_back({.shape = output.sizes().vec(), .options = output.options()});
  }

 private:
  struct Like {
    std::vector<std::int64_t> shape{};
    at::TensorOptions options{};
  };
  RankGroup group_;
  int by_;
  std::vector<Like> like_{};
};

variable_list shift_tracked(const variable_list& tensors, int by, const RankGroup& group, bool is_backward) {
  const bool enabled = at::GradMode::is_enabled();
  CallName name = kCallRingShift;
  name.is_backward = is_backward;
  variable_list tracked;
  for (const at::Tensor& tensor : tensors) {
    if (enabled && tensor.requires_grad()) tracked.push_back(tensor);
  }
  name.has_grad = !tracked.empty();
  variable_list outputs;
  {
    const at::AutoGradMode no_gradient(false);
    outputs = shift_along_ring(tensors, by, group, name);
  }
  if (tracked.empty()) return outputs;
  const auto node = make_node<ShiftBack>(group, by);
  node->set_next_edges(torch::autograd::collect_next_edges(tracked));
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    if (!tensors[index].requires_grad()) continue;
    torch::autograd::set_history(outputs[index], node);
    node->add_output(outputs[index]);
  }
  return outputs;
}

}  // namespace

std::vector<at::Tensor> ring_shift(const std::vector<at::Tensor>& tensors, const RankGroup& group, int by) {
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const std::string argument = "tensors[" + std::to_string(index) + "]";
    require_exchangeable(tensors[index], group, kCallRingShift, argument);
    if (tensors[index]._fw_grad(/*level=*/0).defined())
      refuse(group, kCallRingShift, argument, "there is no forward-mode gradient of this call",
             "a tensor without a tangent", "a dual tensor");
  }
  if (by % group.size() == 0) return tensors;
  return shift_tracked(tensors, by, group, /*is_backward=*/false);
}

}  // namespace zeroth::libtorch
