// Copies of experts on other ranks, for one use.
#pragma once

#include <zeroth/libtorch/expert_ranks.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

struct OwnAndCopies {
  at::Tensor own{};     ///< [own experts, ...]: the parameter's memory
  at::Tensor copies{};  ///< [own copies, ...]: new memory
};

/// parameter: [own experts, ...] of num_experts that the ranks share by slice_sizes(). copies: for each rank the
/// experts that it gets, ascending, none of its own. The gradient of a copy is sent to the owner, which adds those of
/// rank 0, 1, ... to its own, with memory for those of one rank at a time: so `own` must be used by what is computed.
/// A recompute fetches them again, also with KeptCalls: keeping them would keep experts. Collective over the group;
/// blocks; throws as collectives do.
[[nodiscard]] OwnAndCopies with_copies(const at::Tensor& parameter,
                                       const std::vector<std::vector<std::int64_t>>& copies, std::int64_t num_experts,
                                       const ExpertRanks& ranks);

}  // namespace zeroth::libtorch
