#include "libtorch/experts/expert_call.h"

#include <kernels/moe/dispatch.h>
#include <zeroth/libtorch/router.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace zeroth::libtorch {
namespace {

kernels::DropPolicy policy_of(KeepBy by) {
  switch (by) {
    case KeepBy::kPosition:
      return kernels::DropPolicy::kByPosition;
    case KeepBy::kWeight:
      return kernels::DropPolicy::kByScore;
    case KeepBy::kDraw:
      return kernels::DropPolicy::kRandom;
  }
  return kernels::DropPolicy::kByPosition;
}

}  // namespace

std::int64_t expert_capacity(std::int64_t tokens, std::int64_t num_experts, std::int64_t choices, double factor,
                             std::int64_t least) {
  if (!(factor > 0) || num_experts < 1)
    refuse_experts("", "factor", "there is no such capacity", "a factor above 0, and an expert or more",
                   c10::str(factor, " for ", num_experts, " experts"));
  const double rows = factor * static_cast<double>(choices) * static_cast<double>(tokens);
  return std::max(least, static_cast<std::int64_t>(std::ceil(rows / static_cast<double>(num_experts))));
}

at::Tensor keep_within(const at::Tensor& experts, const at::Tensor& weights, std::int64_t num_experts,
                       std::int64_t capacity, KeepBy by, std::uint64_t seed) {
  if (!experts.defined() || experts.dim() != 2 || !weights.defined() || weights.sizes() != experts.sizes())
    refuse_experts("", "experts, weights", "these are no choices and their weights", "two tensors [tokens, choices]",
                   experts.defined() && weights.defined() ? c10::str(experts.sizes(), " and ", weights.sizes())
                                                          : "an undefined tensor");
  if (capacity < 0) refuse_experts("", "capacity", "an expert takes less than no row", "0 or more", c10::str(capacity));
  const at::NoGradGuard no_gradient;
  const std::int64_t choices = experts.size(1);
  if (choices < 1 || choices > 64)
    refuse_experts("", "experts", "a token has too many choices", "1 to 64", c10::str(choices));
  if (experts.numel() >= std::numeric_limits<std::int32_t>::max())
    refuse_experts("", "experts", "there are too many choices", "below 2^31", c10::str(experts.numel()));
  const at::Tensor kept = experts.detach().to(at::kCPU, at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous();
  (void)count_choices(kept, num_experts);
  const at::Tensor chosen = kept.to(at::kInt);
  const at::Tensor slots = at::empty(kept.sizes(), at::kInt);
  const at::Tensor of_choice =
      by == KeepBy::kWeight ? weights.detach().to(at::kCPU, at::kDouble).contiguous() : at::Tensor();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts));
  kernels::DispatchArgs args{.chosen = chosen.const_data_ptr<std::int32_t>(),
                             .tokens = kept.size(0),
                             .k = choices,
                             .experts = num_experts,
                             .capacity = capacity,
                             .policy = policy_of(by),
                             .weights = of_choice.defined() ? of_choice.const_data_ptr() : nullptr,
                             .weights_dtype = DType::kFloat64,
                             .seed = seed,
                             .counts = counts.data(),
                             .slot_of = slots.data_ptr<std::int32_t>()};
  std::vector<std::uint64_t> workspace(kernels::dispatch_workspace_bytes(args, num_experts) / sizeof(std::uint64_t) +
                                       1);
  args.workspace = workspace.data();
  kernels::dispatch_keep(args, 0, num_experts);
  kept.masked_fill_(slots.lt(0), -1);
  return kept.to(experts.device());
}

}  // namespace zeroth::libtorch
