// Rows of a table on a grid, see common/grid.h.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/rows/rows.h>

#include <limits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Neighbouring threads have neighbouring packs of a row, so reads of the host's memory are whole lines.
template <int kLanes>
struct GatherRowsGrid {
  GatherRowsArgs args;
  float none;  ///< instead of values of a row that there is not

  ZR_HOST_DEVICE void operator()(GridThread thread) const {
    for_each_pack<kLanes>(thread, args.n * args.dim, [&](auto lanes, std::int64_t i) {
      using W = PackOf<float, decltype(lanes)::kValue>;
      const std::int64_t index = args.indices[i / args.dim];
      const bool is_row = index >= 0 && index < args.rows;
      const W value = is_row ? W::load(args.table + index * args.dim + i % args.dim) : W::splat(none);
      value.store(args.out + i);
    });
  }
};

template <class Launch>
bool gather_rows_on_grid(const GatherRowsArgs& args, Launch& launch) {
  if (args.n < 0 || args.rows < 0 || args.dim < 1) {
    return false;
  }
  if (args.n == 0) {
    return true;
  }
  with_packs(args.dim % kPack == 0 && is_packable(args.table) && is_packable(args.out), [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::kValue;
    launch(GatherRowsGrid<kLanes>{args, std::numeric_limits<float>::quiet_NaN()},
           threads_for<kLanes>(args.n * args.dim));
  });
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
