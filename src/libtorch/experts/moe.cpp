#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/moe.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <utility>

namespace zeroth::libtorch {

MoeImpl::MoeImpl(const MoeOptions& options, ExpertsModule experts, RowModule residual, RowModule shared)
    : gate_(options.num_experts, options.gate),
      experts_(std::move(experts)),
      residual_(std::move(residual)),
      shared_(std::move(shared)) {
  if (!experts_.module || !experts_.run)
    refuse_experts("", "experts", "a layer has a module of experts", "experts_module(module)", "none");
  gate = register_module("gate",
                         torch::nn::Linear(torch::nn::LinearOptions(options.width, options.num_experts).bias(false)));
  if (options.fixed_router) {
    const at::NoGradGuard no_gradient;
    gate->weight.copy_(fixed_router_weight(options.num_experts, options.width, options.gate.seed));
    gate->weight.set_requires_grad(false);
  }
  register_module("experts", experts_.module);
  if (residual_.module) {
    register_module("residual", residual_.module);
    coefficient = register_module("coefficient", torch::nn::Linear(options.width, 2));
  }
  if (shared_.module) register_module("shared", shared_.module);
  forwards = register_buffer("forwards", at::zeros({}, at::kLong));
  if (options.gate.balance != BalanceBy::kLoss)
    balance_bias = register_buffer("balance_bias", at::zeros({options.num_experts}, at::kDouble));
  if (options.gate.schedule) steps = register_buffer("steps", at::zeros({}, at::kLong));
}

MoeOutput MoeImpl::forward(const at::Tensor& x, const at::Tensor& used) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  if (is_training() && !Gate::is_repeated()) {
    const at::NoGradGuard no_gradient;
    forwards.add_(1);
  }
  GateInput input{.x = rows, .weight = gate->weight, .bias = balance_bias, .used = used, .training = is_training()};
  input.number = forwards.item<std::int64_t>();
  input.step = steps.defined() ? steps.item<std::int64_t>() : 0;
  const Gated gated = gate_.forward(input);
  at::Tensor out = experts_.run(rows, gated.kept, gated.weights.to(rows.scalar_type()));
  if (residual_.module) {
    const at::Tensor mix = at::softmax(coefficient->forward(rows), -1);
    out = out * mix.narrow(-1, 0, 1) + residual_.run(rows) * mix.narrow(-1, 1, 1);
  }
  if (shared_.module) out = out + shared_.run(rows);
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = out.size(-1);
  return {.out = out.view(shape), .balance = gated.balance, .counts = gated.counts};
}

void MoeImpl::begin_step() {
  gate_.begin_step(balance_bias);
  if (!steps.defined()) return;
  const at::NoGradGuard no_gradient;
  steps.add_(1);
}

}  // namespace zeroth::libtorch
