#include "libtorch/parallel/group_call.h"
#include "libtorch/parallel/linear_call.h"

#include <zeroth/libtorch/collectives.h>

#include <c10/util/StringUtil.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace zeroth::libtorch {
namespace {

/// Numbers of the calls in tags; ring_shift is 9.
constexpr CallName kCallCopy{.call = "copy_to_group", .number = 1};
constexpr CallName kCallReduce{.call = "reduce_from_group", .number = 2};
constexpr CallName kCallSplit{.call = "split_to_group", .number = 3};
constexpr CallName kCallGather{.call = "gather_from_group", .number = 4};
constexpr CallName kCallAllReduce{.call = "all_reduce", .number = 5};
constexpr CallName kCallAllGather{.call = "all_gather", .number = 6};
constexpr CallName kCallReduceScatter{.call = "reduce_scatter", .number = 7};
constexpr CallName kCallAllToAll{.call = "all_to_all", .number = 8};

at::Tensor sum(const at::Tensor& x, const RankGroup& group, const CallName& name, LinearMap forward,
               LinearMap backward) {
  require_exchangeable(x, group, name);
  if (group.size() == 1) return x;
  return apply_linear(x, {.group = group, .name = name, .forward = forward, .backward = backward});
}

at::Tensor cut(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes,
               const CallName& name, LinearMap forward) {
  require_exchangeable(x, group, name);
  const std::int64_t from_0 = dim_of(x, dim, group, name);
  std::vector<std::int64_t> slices = sizes_of_whole(x.size(from_0), from_0, sizes, group, name, "sizes");
  if (group.size() == 1) return x;
  return apply_linear(x, {.group = group,
                          .name = name,
                          .forward = forward,
                          .backward = LinearMap::kGather,
                          .dim = from_0,
                          .sizes = std::move(slices)});
}

at::Tensor join(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes,
                const CallName& name, LinearMap backward) {
  require_exchangeable(x, group, name);
  const std::int64_t from_0 = dim_of(x, dim, group, name);
  std::vector<std::int64_t> slices = sizes_with_own(x, from_0, sizes, group, name, "sizes");
  if (group.size() == 1) return x;
  return apply_linear(x, {.group = group,
                          .name = with_sizes(name, sizes, "sizes"),
                          .forward = LinearMap::kGather,
                          .backward = backward,
                          .dim = from_0,
                          .sizes = std::move(slices)});
}

}  // namespace

at::Tensor copy_to_group(const at::Tensor& x, const RankGroup& group) {
  return sum(x, group, kCallCopy, LinearMap::kIdentity, LinearMap::kSum);
}

at::Tensor reduce_from_group(const at::Tensor& x, const RankGroup& group) {
  return sum(x, group, kCallReduce, LinearMap::kSum, LinearMap::kIdentity);
}

at::Tensor split_to_group(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes) {
  return cut(x, dim, group, sizes, kCallSplit, LinearMap::kSlice);
}

at::Tensor gather_from_group(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes) {
  return join(x, dim, group, sizes, kCallGather, LinearMap::kSlice);
}

at::Tensor all_reduce(const at::Tensor& x, const RankGroup& group) {
  return sum(x, group, kCallAllReduce, LinearMap::kSum, LinearMap::kSum);
}

at::Tensor all_gather(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes) {
  return join(x, dim, group, sizes, kCallAllGather, LinearMap::kReduceScatter);
}

at::Tensor reduce_scatter(const at::Tensor& x, std::int64_t dim, const RankGroup& group, const SliceSizes& sizes) {
  return cut(x, dim, group, sizes, kCallReduceScatter, LinearMap::kReduceScatter);
}

at::Tensor all_to_all(const at::Tensor& x, std::int64_t split_dim, std::int64_t concat_dim, const RankGroup& group,
                      const SliceSizes& split_sizes, const SliceSizes& concat_sizes) {
  require_exchangeable(x, group, kCallAllToAll);
  const std::int64_t split = dim_of(x, split_dim, group, kCallAllToAll, "split_dim");
  const std::int64_t concat = dim_of(x, concat_dim, group, kCallAllToAll, "concat_dim");
  if (split == concat && split_sizes.has_value() != concat_sizes.has_value())
    refuse(group, kCallAllToAll, split_sizes ? "concat_sizes" : "split_sizes", "slices of any size need both lists",
           "the sizes of the slices for each rank and from each rank", "None");
  std::vector<std::int64_t> given =
      sizes_of_whole(x.size(split), split, split_sizes, group, kCallAllToAll, "split_sizes");
  const auto own = static_cast<std::size_t>(group.rank());
  std::vector<std::int64_t> taken;
  if (split != concat) {
    taken = sizes_with_own(x, concat, concat_sizes, group, kCallAllToAll, "concat_sizes");
  } else {
    taken = concat_sizes.value_or(std::vector<std::int64_t>(given.size(), given[own]));
    require_one_a_rank(taken, group, kCallAllToAll, "concat_sizes");
    if (taken[own] != given[own])
      refuse(group, kCallAllToAll, "concat_sizes", "this rank's slice for itself has two sizes",
             c10::str(given[own], " for rank ", own, ", as split_sizes say"), c10::str(at::IntArrayRef(taken)));
  }
  if (group.size() == 1) return x;
  return apply_linear(x, {.group = group,
                          .name = with_sizes(kCallAllToAll, concat_sizes, "concat_sizes"),
                          .forward = LinearMap::kExchange,
                          .backward = LinearMap::kExchange,
                          .dim = split,
                          .sizes = std::move(given),
                          .other_dim = concat,
                          .other_sizes = std::move(taken)});
}

}  // namespace zeroth::libtorch
