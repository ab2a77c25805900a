// The sum of squares of one block of 1,024 elements, in the order that norm.h fixes.
#pragma once

#include <kernels/common/lane.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Independent sums of a block: enough to hide the latency of a fused multiply-add at every width.
constexpr std::int64_t kNormLanes = 32;
constexpr std::int64_t kNormRows = 32;

/// D: the vector of doubles; In: element type in memory.
template <class D, class In>
ZR_INLINE double norm_block(const In* block) {
  constexpr std::int64_t kVectors = kNormLanes / D::kLanes;
  D sum[kVectors];
  for (std::int64_t k = 0; k < kVectors; ++k) {
    sum[k] = D::splat(0.0);
  }
  for (std::int64_t row = 0; row < kNormRows; ++row) {
    for (std::int64_t k = 0; k < kVectors; ++k) {
      const D x = D::load(block + row * kNormLanes + k * D::kLanes);
      sum[k] = fused(x, x, sum[k]);
    }
  }
  for (std::int64_t half = kVectors / 2; half > 0; half /= 2) {
    for (std::int64_t k = 0; k < half; ++k) {
      sum[k] = sum[k] + sum[k + half];
    }
  }
  double lane[D::kLanes];
  sum[0].store(lane);
  for (std::int64_t half = D::kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t l = 0; l < half; ++l) {
      lane[l] += lane[l + half];
    }
  }
  return lane[0];
}

}  // namespace
}  // namespace zeroth::kernels
