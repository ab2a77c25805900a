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

/// The product of two rows, in the lanes of permute.h.
template <class W, class T>
ZR_HOST_DEVICE ZR_INLINE typename W::Value row_product(const T* a, const T* b, std::int64_t width) {
  using Number = typename W::Value;
  constexpr std::int64_t kVectors = kDotLanes / W::kLanes;
  W sums[kVectors];
  for (auto& sum : sums) sum = W::splat(Number{0});
  std::int64_t c = 0;
  for (; c + kDotLanes <= width; c += kDotLanes) {
    for (std::int64_t i = 0; i < kVectors; ++i)
      sums[i] = fused(W::load(a + c + i * W::kLanes), W::load(b + c + i * W::kLanes), sums[i]);
  }
  Number lanes[kDotLanes];
  for (std::int64_t i = 0; i < kVectors; ++i) sums[i].store(lanes + i * W::kLanes);
  using One = Lane<Number>;
  for (std::int64_t l = 0; c + l < width; ++l)
    lanes[l] = fused(One::load(a + c + l), One::load(b + c + l), One{lanes[l]}).v;
  for (std::int64_t half = kDotLanes / 2; half > 0; half /= 2) {
    for (std::int64_t l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return canonical(One{lanes[0]}).v;
}

}  // namespace
}  // namespace zeroth::kernels
