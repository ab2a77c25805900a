#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/balance.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace zeroth::libtorch {

at::Tensor sequence_balance_loss(const at::Tensor& scores, const at::Tensor& experts,
                                 const std::vector<std::int64_t>& sequences) {
  const bool fits = scores.defined() && experts.defined() && scores.dim() == 2 && experts.dim() == 2 &&
                    scores.is_floating_point() && scores.size(0) == experts.size(0);
  if (!fits)
    refuse_experts("", "scores, experts", "these are no scores and choices of tokens",
                   "[tokens, experts] and [tokens, choices]",
                   scores.defined() && experts.defined() ? c10::str(scores.sizes(), " and ", experts.sizes())
                                                         : "an undefined tensor");
  const std::int64_t all = std::accumulate(sequences.begin(), sequences.end(), std::int64_t{0});
  if (all != scores.size(0) || std::ranges::any_of(sequences, [](std::int64_t length) { return length < 0; }))
    refuse_experts("", "sequences", "these are not the lengths of the tokens' sequences",
                   c10::str("0 or more each, ", scores.size(0), " in all"), c10::str(sequences));
  const std::int64_t num_experts = scores.size(1);
  const at::Tensor chosen = experts.detach().to(at::kCPU, at::kLong).contiguous();
  const at::Tensor parts = scores / scores.sum(-1, /*keepdim=*/true);
  const auto counted = std::ranges::count_if(sequences, [](std::int64_t length) { return length > 0; });
  at::Tensor loss = at::zeros({}, scores.options().requires_grad(false));
  std::int64_t begin = 0;
  for (const std::int64_t length : sequences) {
    if (length == 0) continue;
    const std::vector<std::int64_t> counts = count_choices(chosen.narrow(0, begin, length), num_experts);
    const double tokens = static_cast<double>(length);
    // f_i over the length that P_i is divided by, and over the sequences.
    const double scale = static_cast<double>(num_experts) /
                         (static_cast<double>(experts.size(1)) * tokens * tokens * static_cast<double>(counted));
    std::vector<double> factors(counts.size());
    for (std::size_t expert = 0; expert < factors.size(); ++expert)
      factors[expert] = scale * static_cast<double>(counts[expert]);
    const at::Tensor f = at::tensor(factors, at::kDouble).to(scores.device(), scores.scalar_type());
    loss = loss + (parts.narrow(0, begin, length).sum(0) * f).sum();
    begin += length;
  }
  return loss;
}

void update_balance_bias(const at::Tensor& bias, const std::vector<std::int64_t>& load, double rate) {
  const bool fits = bias.defined() && bias.dim() == 1 && bias.size(0) == static_cast<std::int64_t>(load.size()) &&
                    (bias.scalar_type() == at::kFloat || bias.scalar_type() == at::kDouble);
  if (!fits)
    refuse_experts("", "bias", "this is no bias of the choice that takes small steps",
                   c10::str("[", load.size(), "] of float32 or float64"),
                   bias.defined() ? c10::str(bias.scalar_type(), " ", bias.sizes()) : "an undefined tensor");
  if (!(rate >= 0.0) || !std::isfinite(rate))
    refuse_experts("", "rate", "a bias does not move so", "0 or more", c10::str(rate));
  const at::NoGradGuard no_gradient;
  const std::int64_t all = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  const auto num_experts = static_cast<std::int64_t>(load.size());
  std::vector<double> steps(load.size());
  for (std::size_t expert = 0; expert < steps.size(); ++expert) {
    const std::int64_t missing = all - num_experts * load[expert];  // of whole numbers: the sign is exact
    steps[expert] = missing > 0 ? rate : missing < 0 ? -rate : 0.0;
  }
  bias.add_(at::tensor(steps, at::kDouble).to(bias.device(), bias.scalar_type()));
}

}  // namespace zeroth::libtorch
