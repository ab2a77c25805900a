// The arithmetic of lowrank.h for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/lowrank/lowrank.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Independent sums of an element of P, and of a product of two columns.
constexpr std::int64_t kRankLanes = 16;

/// The lanes of a sum, in vectors.
template <class W>
struct RankLanes {
  static constexpr std::int64_t kVectors = kRankLanes / W::kLanes;
  W sum[kVectors];

  ZR_INLINE void clear() {
    for (auto& one : sum) one = W::splat(0);
  }
  /// a and b: the next 16 elements, or fewer with zeros after them.
  template <class A, class B>
  ZR_INLINE void add(const A* a, const B* b) {
    for (std::int64_t k = 0; k < kVectors; ++k)
      sum[k] = fused(W::load(a + k * W::kLanes), W::load(b + k * W::kLanes), sum[k]);
  }
  [[nodiscard]] ZR_INLINE typename W::Value folded() const {
    typename W::Value lanes[kRankLanes];
    for (std::int64_t k = 0; k < kVectors; ++k) sum[k].store(lanes + k * W::kLanes);
    for (std::int64_t half = kRankLanes / 2; half > 0; half /= 2) {
      for (std::int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    return lanes[0];
  }
};

}  // namespace
}  // namespace zeroth::kernels
