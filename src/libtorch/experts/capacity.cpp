#include "libtorch/experts/expert_call.h"

#include <zeroth/libtorch/router.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace zeroth::libtorch {
namespace {

/// A bijection of 64 bits that spreads neighbouring numbers. Ref: Steele et al., "Fast Splittable Pseudorandom Number
/// Generators", 2014 (SplitMix64).
std::uint64_t spread(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31U);
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
  const std::int64_t tokens = experts.size(0);
  const std::int64_t choices = experts.size(1);
  const at::Tensor kept = experts.detach().to(at::kCPU, at::kLong, /*non_blocking=*/false, /*copy=*/true).contiguous();
  const at::Tensor of_choice = weights.detach().to(at::kCPU, at::kDouble).contiguous();
  auto* const expert_of = kept.data_ptr<std::int64_t>();
  const double* const weight_of = of_choice.data_ptr<double>();
  (void)count_choices(kept, num_experts);
  // By position: choice by choice, and of each the tokens in their order.
  std::vector<std::vector<std::int64_t>> of_experts(static_cast<std::size_t>(num_experts));
  for (std::int64_t choice = 0; choice < choices; ++choice) {
    for (std::int64_t token = 0; token < tokens; ++token) {
      const std::int64_t at = token * choices + choice;
      if (expert_of[at] >= 0) of_experts[static_cast<std::size_t>(expert_of[at])].push_back(at);
    }
  }
  for (std::vector<std::int64_t>& rows : of_experts) {
    if (static_cast<std::int64_t>(rows.size()) <= capacity) continue;
    if (by == KeepBy::kWeight)
      std::ranges::stable_sort(rows, std::ranges::greater(), [&](std::int64_t at) { return weight_of[at]; });
    if (by == KeepBy::kDraw)
      std::ranges::stable_sort(rows, {},
                               [&](std::int64_t at) { return spread(spread(seed) ^ static_cast<std::uint64_t>(at)); });
    for (std::size_t row = static_cast<std::size_t>(capacity); row < rows.size(); ++row) expert_of[rows[row]] = -1;
  }
  return kept.to(experts.device());
}

}  // namespace zeroth::libtorch
