// What a router needs of a lane, beyond lane.h: see moe_avx2.h and moe_avx512.h for vectors.
#pragma once

#include <kernels/common/lane.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// 2^n of n + 1.5 * 2^23, for n from -126 to 127.
ZR_HOST_DEVICE ZR_INLINE Lane<float> power_of(Lane<float> shifted) {
  return {__builtin_bit_cast(float, (__builtin_bit_cast(std::uint32_t, shifted.v) << 23U) + 0x3f800000U)};
}
/// 2^n of n + 1.5 * 2^52, for n from -1022 to 1023.
ZR_HOST_DEVICE ZR_INLINE Lane<double> power_of(Lane<double> shifted) {
  return {__builtin_bit_cast(double, (__builtin_bit_cast(std::uint64_t, shifted.v) << 52U) + 0x3ff0000000000000ULL)};
}
/// a where x < limit, else b; b for a NaN.
template <class T>
ZR_HOST_DEVICE ZR_INLINE Lane<T> select_below(Lane<T> x, Lane<T> limit, Lane<T> a, Lane<T> b) {
  return x.v < limit.v ? a : b;
}
/// Bit k: lane k of x is above that of limit; not for a NaN.
template <class T>
ZR_HOST_DEVICE ZR_INLINE unsigned above(Lane<T> x, Lane<T> limit) {
  return x.v > limit.v ? 1U : 0U;
}

}  // namespace
}  // namespace zeroth::kernels
