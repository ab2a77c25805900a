// The sums of blocks of norm.h on a grid, see common/grid.h. A block's lanes are the threads of a warp.
#pragma once

#include <kernels/common/grid.h>
#include <kernels/norm/norm.h>
#include <kernels/norm/norm_math.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// The number of threads is a multiple of kNormLanes.
template <class In>
struct NormGrid {
  const In* src;
  std::int64_t n;
  double* sums;

  /// deliver(block, lane, a_l) for every block of the thread's warp, with all lanes of the warp side by side.
  template <class Deliver>
  ZR_HOST_DEVICE void operator()(GridThread thread, const Deliver& deliver) const {
    const std::int64_t lane = thread.index % kNormLanes;
    const std::int64_t warps = thread.count / kNormLanes;
    const std::int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
    for (std::int64_t block = thread.index / kNormLanes; block < blocks; block += warps) {
      const std::int64_t first = block * kNormBlock;
      const std::int64_t count = n - first < kNormBlock ? n - first : kNormBlock;
      deliver(block, lane, norm_lane(src + first, count, lane));
    }
  }
};

/// launch(body, threads) folds the values that the lanes of a block deliver and writes the sum to body.sums[block].
template <class Launch>
bool norm_on_grid(const void* src, DType dtype, std::int64_t n, double* sums, Launch& launch) {
  if (n < 0 || !is_trained(dtype) || dtype == DType::kFloat16) {
    return false;
  }
  if (n == 0) {
    return true;
  }
  const std::int64_t threads = (n + kNormBlock - 1) / kNormBlock * kNormLanes;
  switch (dtype) {
    case DType::kFloat64:
      launch(NormGrid<double>{static_cast<const double*>(src), n, sums}, threads);
      break;
    case DType::kBFloat16:
      launch(NormGrid<BFloat16>{static_cast<const BFloat16*>(src), n, sums}, threads);
      break;
    default:
      launch(NormGrid<float>{static_cast<const float*>(src), n, sums}, threads);
  }
  return true;
}

}  // namespace
}  // namespace zeroth::kernels
