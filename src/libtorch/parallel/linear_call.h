// Calls that are linear maps of one tensor, for autograd: the gradient of each is another of them.
#pragma once

#include "libtorch/parallel/group_call.h"

#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

enum class LinearMap : std::uint8_t {
  kIdentity,       ///< no call
  kSum,            ///< all_reduce
  kSlice,          ///< own slice; no call
  kPad,            ///< own slice among zeros; no call
  kFirst,          ///< x on rank 0, zeros on the others; no call
  kGather,         ///< all_gather
  kReduceScatter,  ///< reduce_scatter
  kExchange,       ///< all_to_all
};

/// True if ranks talk to each other.
[[nodiscard]] constexpr bool calls_ranks(LinearMap map) {
  return map == LinearMap::kSum || map == LinearMap::kGather || map == LinearMap::kReduceScatter ||
         map == LinearMap::kExchange;
}

/// A map, the map of its gradients, and how the tensor is cut. kExchange cuts `dim` into `sizes` and joins `other_dim`
/// of `other_sizes`; its backward does the reverse.
struct LinearCall {
  RankGroup group;
  CallName name{};
  LinearMap forward = LinearMap::kIdentity;
  LinearMap backward = LinearMap::kIdentity;
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes{};
  std::int64_t other_dim = 0;
  std::vector<std::int64_t> other_sizes{};

  /// The call that the gradient goes through.
  [[nodiscard]] LinearCall transposed() const;
};

/// The result, with its gradient. Arguments have been checked. Blocks if calls_ranks().
[[nodiscard]] at::Tensor apply_linear(const at::Tensor& x, const LinearCall& call);

}  // namespace zeroth::libtorch
