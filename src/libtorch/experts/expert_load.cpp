#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/router.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace zeroth::libtorch {

void ExpertLoad::begin_step() {
  std::fill(chosen_.begin(), chosen_.end(), 0);
}

void ExpertLoad::add(const at::Tensor& experts, const std::vector<RankGroup>& groups) {
  const at::NoGradGuard no_gradient;
  const std::size_t num_experts = chosen_.size();
  std::vector<std::int64_t> counts =
      count_choices(experts.detach().to(at::kCPU, at::kLong).contiguous(), static_cast<std::int64_t>(num_experts));
  counts.push_back(experts.size(0));
  at::Tensor counted = at::tensor(counts, at::kLong);
  ranks_ = 1;
  for (const RankGroup& group : groups) {
    counted = all_reduce(counted, group);
    ranks_ *= group.size();
  }
  const std::int64_t* const all = counted.data_ptr<std::int64_t>();
  for (std::size_t expert = 0; expert < num_experts; ++expert) chosen_[expert] += all[expert];
  tokens_ = all[num_experts];
}

at::Tensor ExpertLoad::balance_loss(const at::Tensor& scores) const {
  const auto num_experts = static_cast<std::int64_t>(chosen_.size());
  if (!scores.defined() || scores.dim() != 2 || scores.size(1) != num_experts)
    refuse_experts("", "scores", "these are not the scores of the experts", c10::str("[tokens, ", num_experts, "]"),
                   scores.defined() ? c10::str(scores.sizes()) : "an undefined tensor");
  const std::int64_t all = std::accumulate(chosen_.begin(), chosen_.end(), std::int64_t{0});
  std::vector<double> factors(chosen_.size());
  const double scale = static_cast<double>(num_experts) * static_cast<double>(ranks_) /
                       static_cast<double>(std::max<std::int64_t>(tokens_, 1));
  for (std::size_t expert = 0; expert < factors.size(); ++expert)
    factors[expert] =
        scale * static_cast<double>(chosen_[expert]) / static_cast<double>(std::max<std::int64_t>(all, 1));
  const at::Tensor f = at::tensor(factors, at::kDouble).to(scores.device(), scores.scalar_type());
  return (scores.sum(0) * f).sum();
}

at::Tensor router_z_loss(const at::Tensor& logits) {
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  const double tokens = static_cast<double>(std::max<std::int64_t>(logits.size(0), 1));
  return at::logsumexp(wide, -1).square().sum() / tokens;
}

}  // namespace zeroth::libtorch
