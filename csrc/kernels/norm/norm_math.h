// The sum of squares of one block of 1,024 elements, in the order that norm.h fixes.
#pragma once

#include <kernels/common/lane.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Number of independent sums of a block: enough to hide the latency of a fused multiply-add at every width.
constexpr std::int64_t kNormLanes = 32;
constexpr std::int64_t kNormRows = 32;

template <class D>
ZR_HOST_DEVICE ZR_INLINE D norm_added(D sum, D x) {
  return fused(x, x, sum);
}

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
      sum[k] = norm_added(sum[k], D::load(block + row * kNormLanes + k * D::kLanes));
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

/// a_l of one lane, for devices whose lanes are threads. The block has `count` elements; missing ones would add zeros,
/// which change no bit of a sum of squares.
template <class In>
ZR_HOST_DEVICE ZR_INLINE double norm_lane(const In* block, std::int64_t count, std::int64_t lane) {
  using D = Lane<double>;
  D sum = D::splat(0.0);
  if (count == kNormLanes * kNormRows) {  // a constant number of iterations: loads need not wait for each other
    for (std::int64_t row = 0; row < kNormRows; ++row) {
      sum = norm_added(sum, D::load(block + row * kNormLanes + lane));
    }
  } else {
    for (std::int64_t i = lane; i < count; i += kNormLanes) {
      sum = norm_added(sum, D::load(block + i));
    }
  }
  return sum.v;
}

/// Folds the lanes: above(a, half) returns the `a` of the lane `half` further on. Lane 0 gets the result.
template <class A, class Above>
ZR_HOST_DEVICE ZR_INLINE A norm_fold(A a, const Above& above) {
  for (int half = static_cast<int>(kNormLanes) / 2; half > 0; half /= 2) {
    a = a + above(a, half);
  }
  return a;
}

}  // namespace
}  // namespace zeroth::kernels
