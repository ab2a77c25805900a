#include "libtorch/loss_scale.h"

#include "libtorch/gradient_level.h"
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
  /// `fixed`: a constant that is the node's own, at any level.
  ScaleGradient(LossScale::Crossing crossing, double fixed) : crossing_(std::move(crossing)), fixed_(fixed) {}

  variable_list apply(variable_list&& grads) override {
    const auto engine = crossing_.engine.lock();
    if (!engine || !grads[0].defined() || GradientLevel::is_inside(*engine)) return std::move(grads);
    if (crossing_.enters) engine->enter_scaled();
    const auto around = crossing_.around.lock();
    const double outside = around ? around->scale_inside() : GradientLevel::scale_outside();
    const double inside = engine->scale_inside();
    const double factor = fixed_ * (crossing_.enters ? inside / outside : outside / inside);
    return {cross(grads[0], factor, {crossing_.engine, crossing_.around, !crossing_.enters})};
  }
  std::string name() const override { return crossing_.enters ? "ZerothScale" : "ZerothUnscale"; }
  [[nodiscard]] const LossScale::Crossing& crossing() const { return crossing_; }

  /// The gradient times `factor`; `back`: what a derivative of it crosses.
  static at::Tensor cross(const at::Tensor& gradient, double factor, LossScale::Crossing back);

 private:
  LossScale::Crossing crossing_;
  double fixed_;
};

Edge edge_through(const at::Tensor& tensor, Edge own, LossScale::Crossing crossing, double fixed = 1.0) {
  const auto node = make_node<ScaleGradient>(std::move(crossing), fixed);
  node->add_next_edge(std::move(own));
  node->add_input_metadata(tensor);
  return {node, 0};
}

at::Tensor ScaleGradient::cross(const at::Tensor& gradient, double factor, LossScale::Crossing back) {
  const bool has_derivative = at::GradMode::is_enabled() && gradient.requires_grad();
  if (!has_derivative && factor == 1.0) return gradient;
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = gradient * factor;
  }
  if (has_derivative) {
    torch::autograd::impl::set_gradient_edge(
        result, edge_through(gradient, torch::autograd::impl::gradient_edge(gradient), std::move(back), factor));
  }
  return result;
}

}  // namespace

const LossScale::Crossing* LossScale::crossing(const torch::autograd::Node& node) {
  const auto* ours = dynamic_cast<const ScaleGradient*>(&node);
  return ours == nullptr ? nullptr : &ours->crossing();
}

bool LossScale::is_entry(const torch::autograd::Node& node) {
  const Crossing* const ours = crossing(node);
  return ours != nullptr && ours->enters;
}

at::Tensor LossScale::leave(const at::Tensor& gradient, double factor, const std::shared_ptr<Runtime>& engine) {
  return ScaleGradient::cross(gradient, factor,
                              {.engine = engine, .around = GradientLevel::engine_around(*engine), .enters = true});
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
    torch::autograd::impl::set_gradient_edge(output, edge_through(output, own, crossing_now(/*enters=*/true)));
  }
}

LossScale::Crossing LossScale::crossing_now(bool enters) const {
  return {.engine = runtime_, .around = GradientLevel::engine_around(*runtime_.lock()), .enters = enters};
}

LossScale::Detour LossScale::detour_of(const at::Tensor& tensor, bool enters) const {
  const Edge own = torch::autograd::impl::gradient_edge(tensor);
  return {.tensor = tensor,
          .own = own,
          .through = edge_through(tensor, own, crossing_now(enters)),
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

at::Tensor LossScale::open_input(const at::Tensor& input) {
  if (!at::GradMode::is_enabled() || !input.requires_grad()) return input;
  if (!input.is_leaf()) {
    const auto known = [&](const Detour& one) { return one.tensor.is_same(input); };
    if (std::ranges::none_of(inputs_, known)) take(inputs_.emplace_back(detour_of(input, /*enters=*/false)));
    return input;
  }
  const auto known = std::ranges::find_if(leaves_, [&](const Stand& one) { return one.leaf.is_same(input); });
  if (known != leaves_.end()) return known->alias;
  const Stand& made = leaves_.emplace_back(
      Stand{.leaf = input, .alias = input.detach(), .version = static_cast<std::uint32_t>(input._version())});
  torch::autograd::impl::set_gradient_edge(made.alias, detour_of(input, /*enters=*/false).through);
  return made.alias;
}

void LossScale::close_inputs() noexcept {
  for (const Detour& detour : inputs_) leave(detour);
  inputs_.clear();
  leaves_.clear();
}

void LossScale::require_unwritten_leaves() const {
  for (const Stand& one : leaves_) {
    ZR_CHECK(static_cast<std::uint32_t>(one.alias._version()) == one.version, ErrorCode::kModel,
             "the forward wrote to an input that is a leaf and requires a gradient",
             {.where = "libtorch.loss_scale",
              .which = one.leaf.toString() + " " + c10::str(one.leaf.sizes()),
              .expected = "an operation that is not in place",
              .hint = "torch has no gradient for it either; let forward begin with x = x.clone()"});
  }
}

void LossScale::give(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad() || !parameter.is_leaf()) continue;
    take(given_.emplace_back(detour_of(parameter, /*enters=*/true)));
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
