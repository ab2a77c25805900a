// The arithmetic of lowrank.h for one vector (or lane) of elements.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/common/uniform.h>
#include <kernels/lowrank/lowrank.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr bool is_matrix(const LowRankShape& shape) {
  return shape.rows >= 0 && shape.columns >= 0 && shape.stride >= shape.columns;
}
constexpr bool has_rank(int rank) {
  return rank >= 1 && rank <= kMostRank;
}
/// The columns of P or Q, which are rows in memory.
constexpr LowRankShape shape_of_factor(std::int64_t elements, std::int64_t stride, int rank) {
  return {.rows = rank, .columns = elements, .stride = stride, .rank = rank};
}

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

/// Elements of P Q^T: of a row, from column c on.
template <class W>
ZR_HOST_DEVICE ZR_INLINE W restored(const LowRankRestoreArgs& args, std::int64_t row, std::int64_t c) {
  W sum = W::splat(args.p[row]) * W::load(args.q + c);
  for (int j = 1; j < args.shape.rank; ++j)
    sum = fused(W::splat(args.p[j * args.p_stride + row]), W::load(args.q + j * args.q_stride + c), sum);
  return canonical(sum);
}

/// A column without those before it.
struct ColumnLeft {
  double length;
  bool is_finite;
  bool is_spanned;
};
ZR_HOST_DEVICE ZR_INLINE ColumnLeft column_left(double before, double left) {
  constexpr double kLeast = 0x1p-40;  // of squares
  const double length = root(Lane<double>{left}).v;
  const bool is_finite = left - left == 0.0;
  return {length, is_finite, is_finite && (left <= kLeast * before || length < 0x1p-126)};
}
/// Elements of the column that takes its place.
template <class W>
ZR_HOST_DEVICE ZR_INLINE W normal_of(W value, const ColumnLeft& column) {
  if (!column.is_finite) return W::splat(__builtin_bit_cast(double, kQuietNan64));
  return column.is_spanned ? W::splat(0.0) : value / W::splat(column.length);
}

ZR_HOST_DEVICE ZR_INLINE float drawn(std::uint32_t seed, std::int64_t i) {
  return 2.0F * uniform_of(seed, static_cast<std::uint32_t>(i)) - 1.0F;
}

}  // namespace
}  // namespace zeroth::kernels
