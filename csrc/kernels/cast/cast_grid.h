// cast_range on a grid, see common/grid.h.
#pragma once

#include <kernels/cast/cast_math.h>
#include <kernels/cast/cast_variants.h>
#include <kernels/common/grid.h>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

template <class Types, int kLanes>
struct CastGrid {
  typename Types::Out* dst;
  const typename Types::In* src;
  std::int64_t n;

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, n, [&](auto lanes, std::int64_t i) {
      constexpr int kCount = decltype(lanes)::kValue;
      const auto in = load_elements<kCount>(src + i);
      Elements<typename Types::Out, kCount> out;
      for (int k = 0; k < kCount; ++k) {
        cast_element(in.element + k, out.element + k);
      }
      store_elements(dst + i, out);
    });
  }
};

template <class Launch>
bool cast_on_grid(const detail::CastArgs& args, Launch& launch) {
  if (args.n < 0 || !is_castable(args.src_dtype, args.dst_dtype)) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_cast_types(args.src_dtype, args.dst_dtype, [&](auto types) {
    using Types = decltype(types);
    auto* const dst = static_cast<typename Types::Out*>(args.dst);
    const auto* const src = static_cast<const typename Types::In*>(args.src);
    with_packs(is_packable(dst) && is_packable(src), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::kValue;
      launch(CastGrid<Types, kLanes>{dst, src, args.n}, threads_for<kLanes>(args.n));
    });
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
