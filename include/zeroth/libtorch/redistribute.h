// redistribute(): a tensor that lies on the ranks in one way, laid in another, with its gradient.
#pragma once

#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/parallel/sbp.h>

#include <ATen/core/Tensor.h>

namespace zeroth::libtorch {

/// How slices are cut and gradients lie.
struct Redistribution {
  /// Of `from`, if that is a split: without it all ranks have as many indices along the dim as this one.
  SliceSizes source_sizes{};
  /// Of `to`, if that is a split: without it slice_sizes().
  SliceSizes to_sizes{};
  BroadcastGradients gradients = BroadcastGradients::kParts;
};

/// x: this rank's share of a logical tensor that lies as `from` says; returns its share as `to` says, by the cheapest
/// call (sbp.h says which, and its bytes). The gradient, which lies as gradient_of() of `to`, goes to that of `from` by
/// the reverse conversion. Where nothing changes the result is `x` itself; other results are new tensors. Matched call,
/// dtypes, errors: collectives.h. Throws kUsage, too, for dims that x does not have.
[[nodiscard]] at::Tensor redistribute(const at::Tensor& x, const Sbp& from, const Sbp& to, const RankGroup& group,
                                      const Redistribution& how = {});

}  // namespace zeroth::libtorch
