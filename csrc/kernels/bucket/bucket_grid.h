// Gradient buckets on a grid, see common/grid.h.
#pragma once

#include <kernels/bucket/bucket_math.h>
#include <kernels/bucket/bucket_variants.h>
#include <kernels/common/grid.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Returns the number of its thread's elements that are infinite or NaN.
template <bool kAdd, class Types, int kLanes>
struct BucketGrid {
  typename Types::Out* dst;
  const typename Types::In* src;
  std::int64_t n;

  ZR_HOST_DEVICE std::int64_t operator()(GridThread thread) const {
    std::int64_t nonfinite = 0;
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      using W = PackOf<typename Types::Sum, decltype(lanes)::kValue>;
      const W value = W::load(src + i);
      nonfinite += value.nonfinite();
      if constexpr (kAdd) {
        bucket_sum(W::load(dst + i), value).store(dst + i);
      } else {
        value.store(dst + i);
      }
    });
    return nonfinite;
  }
};

/// launch(body, threads) adds the return values of the threads to the caller's count.
template <class Launch>
bool bucket_on_grid(const detail::BucketArgs& args, Launch& launch) {
  if (args.n < 0 || !is_bucketed(args.src_dtype, args.dst_dtype, args.add)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_bucket_types(args.src_dtype, args.dst_dtype, [&](auto types) {
    using Types = decltype(types);
    auto* const dst = static_cast<typename Types::Out*>(args.dst);
    const auto* const src = static_cast<const typename Types::In*>(args.src);
    with_packs(is_packable(dst) && is_packable(src), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      const std::int64_t threads = threads_for<kLanes>(args.n);
      if constexpr (Types::kAddable) {
        if (args.add) {
          return launch(BucketGrid<true, Types, kLanes>{dst, src, args.n}, threads);
        }
      }
      launch(BucketGrid<false, Types, kLanes>{dst, src, args.n}, threads);
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
