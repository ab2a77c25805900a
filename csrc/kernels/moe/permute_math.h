// The arithmetic of permute.h for one vector (or lane) of columns.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/moe/permute.h>
#include <zeroth/base/dtype.h>

#include <cstdint>
#include <type_traits>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

constexpr std::int64_t kDotLanes = 16;

constexpr bool has_rows(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

template <class T>
using RowNumber = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class W>
ZR_HOST_DEVICE ZR_INLINE W weighted(W value, W weight) {
  return canonical(value * weight);
}

/// One column (or a vector of them) of unpermute, of the token's slots.
template <class W, class T>
ZR_HOST_DEVICE ZR_INLINE W combined(const T* in, std::int64_t width, std::int64_t column, const std::int32_t* slots,
                                    const typename W::Value* weights, std::int64_t k) {
  using Number = typename W::Value;
  W sum = W::splat(Number{0});
  for (std::int64_t j = 0; j < k; ++j) {
    if (slots[j] < 0) continue;
    const Number weight = weights == nullptr ? Number{1} : weights[j];
    sum = fused(W::splat(weight), W::load(in + slots[j] * width + column), sum);
  }
  return canonical(sum);
}

/// The products of a row with each of kRows others, in the lanes of permute.h. kFetch: `later` are kRows rows that are
/// asked for ahead of their turn.
template <class W, int kRows, bool kFetch, class T>
ZR_HOST_DEVICE ZR_INLINE void row_products(const T* a, const T* const* b, std::int64_t width,
                                           typename W::Value* products, const T* const* later) {
  using Number = typename W::Value;
  constexpr std::int64_t kVectors = kDotLanes / W::kLanes;
  constexpr std::int64_t kBytes = kDotLanes * static_cast<std::int64_t>(sizeof(T));
  W sums[kRows][kVectors];
  for (auto& of_row : sums) {
    for (auto& sum : of_row) sum = W::splat(Number{0});
  }
  std::int64_t c = 0;
  for (; c + kDotLanes <= width; c += kDotLanes) {
    if constexpr (kFetch) {
      for (int row = 0; row < kRows; ++row) {
        for (std::int64_t i = 0; i < kBytes; i += 64)
          __builtin_prefetch(reinterpret_cast<const unsigned char*>(later[row] + c) + i, 0, 2);
      }
    }
    for (std::int64_t i = 0; i < kVectors; ++i) {
      const W of_a = W::load(a + c + i * W::kLanes);
      for (int row = 0; row < kRows; ++row)
        sums[row][i] = fused(of_a, W::load(b[row] + c + i * W::kLanes), sums[row][i]);
    }
  }
  using One = Lane<Number>;
  for (int row = 0; row < kRows; ++row) {
    Number lanes[kDotLanes];
    for (std::int64_t i = 0; i < kVectors; ++i) sums[row][i].store(lanes + i * W::kLanes);
    for (std::int64_t l = 0; c + l < width; ++l)
      lanes[l] = fused(One::load(a + c + l), One::load(b[row] + c + l), One{lanes[l]}).v;
    for (std::int64_t half = kDotLanes / 2; half > 0; half /= 2) {
      for (std::int64_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
    }
    products[row] = canonical(One{lanes[0]}).v;
  }
}
template <class W, class T>
ZR_HOST_DEVICE ZR_INLINE typename W::Value row_product(const T* a, const T* b, std::int64_t width) {
  typename W::Value product;
  row_products<W, 1, false>(a, &b, width, &product, static_cast<const T* const*>(nullptr));
  return product;
}

}  // namespace
}  // namespace zeroth::kernels
