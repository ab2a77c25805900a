#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/linear_call.h"

#include <zeroth/libtorch/redistribute.h>
#include <zeroth/parallel/slices.h>

#include <c10/util/StringUtil.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

constexpr CallName kCallRedistribute{.call = "redistribute", .number = 10};

/// What one rank does so that a tensor of `from` becomes one of `to`.
LinearMap map_of(const Sbp& from, const Sbp& to) {
  using Kind = Sbp::Kind;
  switch (conversion_call(from, to)) {
    case ConversionCall::kAllGather:
      return LinearMap::kGather;
    case ConversionCall::kAllReduce:
      return LinearMap::kSum;
    case ConversionCall::kReduceScatter:
      return LinearMap::kReduceScatter;
    case ConversionCall::kAllToAll:
      return LinearMap::kExchange;
    case ConversionCall::kNone:
      break;
  }
  if (from.kind() == Kind::kSplit && to.kind() == Kind::kPartial) return LinearMap::kPad;
  if (from.kind() == Kind::kBroadcast && to.kind() == Kind::kSplit) return LinearMap::kSlice;
  if (from.kind() == Kind::kBroadcast && to.kind() == Kind::kPartial) return LinearMap::kFirst;
  return LinearMap::kIdentity;
}

Sbp from_0(const Sbp& sbp, const at::Tensor& x, const RankGroup& group, const char* argument) {
  if (!sbp.is_split()) return sbp;
  return Sbp::split(static_cast<int>(dim_of(x, sbp.dim(), group, kCallRedistribute, argument)));
}

}  // namespace

at::Tensor redistribute(const at::Tensor& x, const Sbp& from, const Sbp& to, const RankGroup& group,
                        const Redistribution& how) {
  require_exchangeable(x, group, kCallRedistribute);
  const Sbp before = from_0(from, x, group, "source");
  const Sbp after = from_0(to, x, group, "to");
  LinearCall call{.group = group,
                  .name = kCallRedistribute,
                  .forward = map_of(before, after),
                  .backward = map_of(gradient_of(after, how.gradients), gradient_of(before, how.gradients))};
  if (before.is_split()) {
    call.dim = before.dim();
    call.name = with_sizes(call.name, how.source_sizes, "source_sizes");
    call.sizes = sizes_with_own(x, call.dim, how.source_sizes, group, kCallRedistribute, "source_sizes");
  }
  if (after.is_split()) {
    std::vector<std::int64_t> sizes =
        before == after && !how.to_sizes
            ? call.sizes
            : sizes_of_whole(before == after ? sum_of_sizes(call.sizes) : x.size(after.dim()), after.dim(),
                             how.to_sizes, group, kCallRedistribute, "to_sizes");
    if (before == after && sizes != call.sizes)
      refuse(group, kCallRedistribute, "to_sizes", "slices of one dim do not change their sizes",
             c10::str(at::IntArrayRef(call.sizes)), c10::str(at::IntArrayRef(sizes)), "use all_to_all() along the dim");
    if (before.is_split()) {
      call.other_dim = call.dim;
      call.other_sizes = std::move(call.sizes);
    }
    call.dim = after.dim();
    call.sizes = std::move(sizes);
  }
  if (call.forward == LinearMap::kIdentity && call.backward == LinearMap::kIdentity) return x;
  return group.size() == 1 ? x : apply_linear(x, call);
}

}  // namespace zeroth::libtorch
