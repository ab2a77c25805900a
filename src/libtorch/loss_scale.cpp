#include "libtorch/loss_scale.h"

#include "libtorch/runtime.h"
#include "libtorch/torch_versions.h"

#include <zeroth/base/error.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>

namespace zeroth::libtorch {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

class ScaleGradient final : public torch::autograd::Node {
 public:
  ScaleGradient(std::weak_ptr<Runtime> runtime, bool divides) : runtime_(std::move(runtime)), divides_(divides) {}

  variable_list apply(variable_list&& grads) override {
    const auto runtime = runtime_.lock();
    if (!runtime || !grads[0].defined()) return std::move(grads);
    const double scale = runtime->scale_of_backward(divides_);
    if (scale == 1.0) return std::move(grads);
    return {divides_ ? grads[0] / scale : grads[0] * scale};
  }
  std::string name() const override { return divides_ ? "ZerothUnscale" : "ZerothScale"; }
  [[nodiscard]] bool divides() const { return divides_; }

 private:
  std::weak_ptr<Runtime> runtime_;
  bool divides_;
};

Edge edge_through(std::weak_ptr<Runtime> runtime, const at::Tensor& tensor, Edge own, bool divides) {
  const auto node = make_node<ScaleGradient>(std::move(runtime), divides);
  node->add_next_edge(std::move(own));
  node->add_input_metadata(tensor);
  return {node, 0};
}

}  // namespace

bool LossScale::is_entry(const torch::autograd::Node& node) {
  const auto* ours = dynamic_cast<const ScaleGradient*>(&node);
  return ours != nullptr && !ours->divides();
}

void LossScale::scale_outputs(const std::vector<at::Tensor>& outputs, std::uint64_t first_node) const {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    const Edge own = torch::autograd::impl::gradient_edge(output);
    if (!own.function || is_entry(*own.function)) continue;  // it is in the outputs twice
    const std::uint64_t number = own.function->sequence_nr();
    const bool accumulates = number == std::numeric_limits<std::uint64_t>::max();
    ZR_CHECK(!accumulates || !output.is_leaf() || !runtime_.lock()->is_parameter(output), ErrorCode::kModel,
             "an output of the model is a parameter itself, so its gradient would lack the loss scale",
             {.where = "libtorch.loss_scale",
              .which = output.toString(),
              .expected = "a tensor that was computed",
              .hint = "return parameter * 1, or read parameters outside by engine.gathered(parameter)"});
    if (accumulates || number < first_node) continue;
    torch::autograd::impl::set_gradient_edge(output, edge_through(runtime_, output, own, /*divides=*/false));
  }
}

LossScale::Detour LossScale::detour_of(const at::Tensor& tensor, bool divides) const {
  const Edge own = torch::autograd::impl::gradient_edge(tensor);
  return {.tensor = tensor,
          .own = own,
          .through = edge_through(runtime_, tensor, own, divides),
          .was_leaf = tensor.is_leaf()};
}

void LossScale::take(const Detour& detour) {
  torch::autograd::impl::set_gradient_edge(detour.tensor, detour.through);
}

void LossScale::leave(const Detour& detour) noexcept {
  // A tensor that was written in place meanwhile has a history of its own.
  if (detour.tensor.grad_fn() != detour.through.function) return;
  torch::autograd::impl::set_gradient_edge(detour.tensor, detour.was_leaf ? Edge() : detour.own);
}

void LossScale::open_inputs(const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return;
  for (const at::Tensor& input : inputs) {
    const auto known = [&](const Detour& one) { return one.tensor.is_same(input); };
    if (!input.requires_grad() || std::ranges::any_of(inputs_, known)) continue;
    take(inputs_.emplace_back(detour_of(input, /*divides=*/true)));
  }
}

void LossScale::close_inputs() noexcept {
  for (const Detour& detour : inputs_) leave(detour);
  inputs_.clear();
}

void LossScale::give(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad() || !parameter.is_leaf()) continue;
    take(given_.emplace_back(detour_of(parameter, /*divides=*/false)));
  }
}

void LossScale::drop(const std::vector<at::Tensor>& parameters) noexcept {
  for (const at::Tensor& parameter : parameters) {
    const auto found = std::ranges::find_if(given_, [&](const Detour& one) { return one.tensor.is_same(parameter); });
    if (found == given_.end()) continue;
    leave(*found);
    given_.erase(found);
  }
}

void LossScale::suspend() noexcept {
  for (const Detour& detour : given_) leave(detour);
}

void LossScale::resume() noexcept {
  for (const Detour& detour : given_) take(detour);
}

}  // namespace zeroth::libtorch
