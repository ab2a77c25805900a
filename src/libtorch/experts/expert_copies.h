// Copies of experts on other ranks, for one use.
#pragma once

#include <zeroth/libtorch/expert_ranks.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

/// parameter: [own experts, ...] of num_experts that the ranks share by slice_sizes(). copies: for each rank the
/// experts that it gets, ascending, none of its own. Returns [own experts + own copies, ...]. The gradient of a copy is
/// sent to the owner, which adds those of rank 0, 1, ... to its own, with memory for those of one rank at a time.
/// Collective over the group; blocks; throws as collectives do.
[[nodiscard]] at::Tensor with_copies_of_experts(const at::Tensor& parameter,
                                                const std::vector<std::vector<std::int64_t>>& copies,
                                                std::int64_t num_experts, const ExpertRanks& ranks);

}  // namespace zeroth::libtorch
