// Lane<T>: one element with the interface of a SIMD vector. It is the scalar variant of every kernel, the tail loop of
// the wide variants and the element of the CUDA kernels. So the arithmetic of an op is written once.
//
// Rules for the same bits at all widths (see also [Note: One definition per instruction set] in arch.h):
// - Add, subtract, multiply, divide and square root are IEEE. A fused multiply-add is written fused(a, b, c) = a * b +
// c
//   with one rounding. The compiler may not make others (-ffp-contract=off, nvcc -fmad=false).
// - The NaN that results from NaN inputs depends on the processor and on the operand order, which compilers change. So
// every
//   result of arithmetic goes through canonical() before it is stored: any NaN becomes the positive quiet NaN without
//   payload.
#pragma once

#include <kernels/common/arch.h>
#include <kernels/common/uniform.h>
#include <zeroth/base/dtype.h>

#include <cmath>
#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): internal linkage is the point, see arch.h

inline constexpr std::uint32_t kQuietNan32 = 0x7fc00000U;
inline constexpr std::uint64_t kQuietNan64 = 0x7ff8000000000000ULL;

template <class T>
struct Lane;

template <>
struct Lane<float> {
  using Value = float;
  static constexpr std::int64_t kLanes = 1;
  static constexpr bool kChooses = false;
  float v;

  ZR_HOST_DEVICE static ZR_INLINE Lane splat(float x) { return {x}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const float* p) { return {*p}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const BFloat16* p) {
    return {__builtin_bit_cast(float, static_cast<std::uint32_t>(p->bits) << 16U)};
  }
  ZR_HOST_DEVICE ZR_INLINE void store(float* p) const { *p = v; }
  ZR_HOST_DEVICE ZR_INLINE void stream(float* p) const { *p = v; }
  /// Rounds to nearest even; a NaN stays a NaN (quiet, upper payload bits kept).
  ZR_HOST_DEVICE ZR_INLINE void store(BFloat16* p) const {
    const auto x = __builtin_bit_cast(std::uint32_t, v);
    const std::uint32_t rounded = (x + 0x7fffU + ((x >> 16U) & 1U)) >> 16U;
    const std::uint32_t quiet = (x >> 16U) | 0x40U;
    p->bits = static_cast<std::uint16_t>((x & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
  }
  ZR_HOST_DEVICE ZR_INLINE void stream(BFloat16* p) const { store(p); }
  /// The same conversion as Float16 in zeroth/base/dtype.h.
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const Float16* p) {
    const std::uint32_t sign = (p->bits & 0x8000U) << 16U;
    const std::uint32_t exponent = (p->bits >> 10U) & 0x1fU;
    const std::uint32_t mantissa = p->bits & 0x3ffU;
    const std::uint32_t special = 0x7f800000U | (mantissa << 13U) | (mantissa != 0 ? 0x400000U : 0U);
    const std::uint32_t normal = ((exponent + 112U) << 23U) | (mantissa << 13U);
    const std::uint32_t denormal = __builtin_bit_cast(std::uint32_t, static_cast<float>(mantissa) * 0x1p-24F);
    const std::uint32_t magnitude = exponent == 0x1f ? special : (exponent != 0 ? normal : denormal);
    return {__builtin_bit_cast(float, sign | magnitude)};
  }
  ZR_HOST_DEVICE ZR_INLINE void store(Float16* p) const {
    const auto x = __builtin_bit_cast(std::uint32_t, v);
    const std::uint32_t sign = (x >> 16U) & 0x8000U;
    const std::uint32_t magnitude = x & 0x7fffffffU;
    const std::uint32_t nan = 0x7e00U | ((magnitude >> 13U) & 0x3ffU);
    const std::uint32_t normal = (magnitude + 0xfffU + ((magnitude >> 13U) & 1U) - 0x38000000U) >> 13U;
    // Below 2^-14: one unit in the last place of 0.5 is the smallest denormal, so the sum is rounded to a multiple of
    // it.
    const float shifted = __builtin_bit_cast(float, magnitude < 0x38800000U ? magnitude : 0U) + 0.5F;
    const std::uint32_t denormal = __builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000U;
    const std::uint32_t finite = magnitude >= 0x47800000U ? 0x7c00U : (magnitude >= 0x38800000U ? normal : denormal);
    p->bits = static_cast<std::uint16_t>(sign | (magnitude > 0x7f800000U ? nan : finite));
  }
  ZR_HOST_DEVICE ZR_INLINE void stream(Float16* p) const { store(p); }
  /// See [Note: Masters in two halves] in zeroth/base/dtype.h.
  ZR_HOST_DEVICE static ZR_INLINE Lane join(const BFloat16* high, const std::int16_t* low) {
    const auto upper = static_cast<std::uint32_t>(high->bits) << 16U;
    return {__builtin_bit_cast(float, upper + static_cast<std::uint32_t>(static_cast<std::int32_t>(*low)))};
  }
  ZR_HOST_DEVICE ZR_INLINE void split(BFloat16* high, std::int16_t* low) const {
    const auto x = __builtin_bit_cast(std::uint32_t, v);
    high->bits = static_cast<std::uint16_t>((x + 0x8000U) >> 16U);
    *low = static_cast<std::int16_t>(static_cast<std::uint16_t>(x));
  }
  /// Number of lanes (0 or 1) that are infinite or NaN.
  ZR_HOST_DEVICE ZR_INLINE int nonfinite() const {
    return (__builtin_bit_cast(std::uint32_t, v) & 0x7f800000U) == 0x7f800000U ? 1 : 0;
  }
  /// Of the bits without the sign, as integers: infinities and NaN are above all numbers.
  ZR_HOST_DEVICE ZR_INLINE Lane magnitude() const {
    return {__builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, v) & 0x7fffffffU)};
  }
  /// The greater of two magnitude()s, by their bits.
  ZR_HOST_DEVICE static ZR_INLINE Lane greater(Lane a, Lane b) {
    return __builtin_bit_cast(std::uint32_t, a.v) < __builtin_bit_cast(std::uint32_t, b.v) ? b : a;
  }
  ZR_HOST_DEVICE ZR_INLINE float greatest() const { return v; }
  /// Bit k: the magnitude() of lane k has at least the bits of `limit`, as integers.
  ZR_HOST_DEVICE ZR_INLINE unsigned at_least(float limit) const {
    return __builtin_bit_cast(std::uint32_t, magnitude().v) >= __builtin_bit_cast(std::uint32_t, limit) ? 1U : 0U;
  }
  /// The nearest integer, ties to even. |v| < 2^22.
  ZR_HOST_DEVICE ZR_INLINE Lane nearest() const {
    const float shifted = v + 0x1.8p23F;
    return {shifted - 0x1.8p23F};
  }
  /// The integer below. |v| < 2^22. By operations that round to nearest.
  ZR_HOST_DEVICE ZR_INLINE Lane floor() const {
    const float near = nearest().v;
    return {near > v ? near - 1.0F : near};
  }
  /// Inside of [-most, most]; no NaN.
  ZR_HOST_DEVICE ZR_INLINE Lane clamped(float most) const { return {v > most ? most : v < -most ? -most : v}; }
  /// uniform_of() of the elements from `first` on.
  ZR_HOST_DEVICE static ZR_INLINE Lane uniforms(std::uint32_t seed, std::uint32_t first) {
    return {uniform_of(seed, first)};
  }
  /// An integer from -127 to 127: the lowest bits of a sum that is rounded to integers, as grids may do nothing else
  /// than round to nearest.
  ZR_HOST_DEVICE ZR_INLINE void store(std::int8_t* p) const {
    *p = static_cast<std::int8_t>(static_cast<std::uint8_t>(__builtin_bit_cast(std::uint32_t, v + 0x1.8p23F) & 0xffU));
  }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const std::int8_t* p) { return {static_cast<float>(*p)}; }
  /// The sign, the lowest bits of the exponent and the highest of the mantissa, and a number of these bits.
  template <unsigned kExponent, unsigned kMantissa>
  ZR_HOST_DEVICE ZR_INLINE void store_parts(std::int8_t* p) const {
    const auto x = __builtin_bit_cast(std::uint32_t, v);
    const std::uint32_t rest = x >> (23U - kMantissa) & ((1U << (kExponent + kMantissa)) - 1U);
    const std::uint32_t sign = x >> 31U << (kExponent + kMantissa);
    *p = static_cast<std::int8_t>(static_cast<std::uint8_t>(sign | rest));
  }
  template <unsigned kExponent, unsigned kMantissa>
  ZR_HOST_DEVICE static ZR_INLINE Lane load_parts(const std::int8_t* p) {
    const auto code = static_cast<std::uint32_t>(static_cast<std::uint8_t>(*p));
    const std::uint32_t rest = (code & ((1U << (kExponent + kMantissa)) - 1U)) << (23U - kMantissa);
    return {__builtin_bit_cast(float, (code >> (kExponent + kMantissa) & 1U) << 31U | rest)};
  }
  /// The greatest power of two that is not above |v|; 0 below the normal numbers.
  ZR_HOST_DEVICE ZR_INLINE Lane power() const {
    return {__builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, v) & 0x7f800000U)};
  }
  /// NaN where |v| > limit.
  ZR_HOST_DEVICE ZR_INLINE Lane nan_above(float limit) const {
    return {v > limit || v < -limit ? __builtin_bit_cast(float, kQuietNan32) : v};
  }
  /// Bit k: lane k is below zero; -0 and NaN are not.
  ZR_HOST_DEVICE ZR_INLINE unsigned below_zero() const { return v < 0.0F ? 1U : 0U; }
  /// 1, -1, or for a zero and a NaN the value itself.
  ZR_HOST_DEVICE ZR_INLINE Lane sign() const { return {v > 0.0F ? 1.0F : (v < 0.0F ? -1.0F : v)}; }
  /// Lane k is `s` where bit k of `positive` is set, else -s.
  ZR_HOST_DEVICE static ZR_INLINE Lane signed_by(unsigned positive, Lane s) {
    return {(positive & 1U) != 0 ? s.v : -s.v};
  }
};

template <>
struct Lane<double> {
  using Value = double;
  static constexpr std::int64_t kLanes = 1;
  double v;

  ZR_HOST_DEVICE static ZR_INLINE Lane splat(double x) { return {x}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const double* p) { return {*p}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const float* p) { return {static_cast<double>(*p)}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane load(const BFloat16* p) { return {static_cast<double>(Lane<float>::load(p).v)}; }
  ZR_HOST_DEVICE ZR_INLINE void store(double* p) const { *p = v; }
  ZR_HOST_DEVICE ZR_INLINE void store(float* p) const { *p = static_cast<float>(v); }
  ZR_HOST_DEVICE ZR_INLINE void stream(double* p) const { *p = v; }
  ZR_HOST_DEVICE ZR_INLINE void stream(float* p) const { store(p); }
  ZR_HOST_DEVICE ZR_INLINE int nonfinite() const {
    return (__builtin_bit_cast(std::uint64_t, v) & kInfinity64) == kInfinity64 ? 1 : 0;
  }
  ZR_HOST_DEVICE ZR_INLINE unsigned below_zero() const { return v < 0.0 ? 1U : 0U; }
  ZR_HOST_DEVICE ZR_INLINE Lane sign() const { return {v > 0.0 ? 1.0 : (v < 0.0 ? -1.0 : v)}; }
  ZR_HOST_DEVICE static ZR_INLINE Lane signed_by(unsigned positive, Lane s) {
    return {(positive & 1U) != 0 ? s.v : -s.v};
  }

  static constexpr std::uint64_t kInfinity64 = 0x7ff0000000000000ULL;
};

/// Integers are summed as unsigned: overflow wraps in every variant.
template <>
struct Lane<std::uint32_t> {
  using Value = std::uint32_t;
  static constexpr std::int64_t kLanes = 1;
  std::uint32_t v;

  ZR_HOST_DEVICE static ZR_INLINE Lane load(const std::uint32_t* p) { return {*p}; }
  ZR_HOST_DEVICE ZR_INLINE void store(std::uint32_t* p) const { *p = v; }
  ZR_HOST_DEVICE ZR_INLINE void stream(std::uint32_t* p) const { *p = v; }
};

template <>
struct Lane<std::uint64_t> {
  using Value = std::uint64_t;
  static constexpr std::int64_t kLanes = 1;
  std::uint64_t v;

  ZR_HOST_DEVICE static ZR_INLINE Lane load(const std::uint64_t* p) { return {*p}; }
  ZR_HOST_DEVICE ZR_INLINE void store(std::uint64_t* p) const { *p = v; }
  ZR_HOST_DEVICE ZR_INLINE void stream(std::uint64_t* p) const { *p = v; }
};

template <class T>
ZR_HOST_DEVICE ZR_INLINE Lane<T> operator+(Lane<T> a, Lane<T> b) {
  return {a.v + b.v};
}
template <class T>
ZR_HOST_DEVICE ZR_INLINE Lane<T> operator-(Lane<T> a, Lane<T> b) {
  return {a.v - b.v};
}
template <class T>
ZR_HOST_DEVICE ZR_INLINE Lane<T> operator*(Lane<T> a, Lane<T> b) {
  return {a.v * b.v};
}
template <class T>
ZR_HOST_DEVICE ZR_INLINE Lane<T> operator/(Lane<T> a, Lane<T> b) {
  return {a.v / b.v};
}
ZR_HOST_DEVICE ZR_INLINE Lane<float> fused(Lane<float> a, Lane<float> b, Lane<float> c) {
  return {::fmaf(a.v, b.v, c.v)};
}
ZR_HOST_DEVICE ZR_INLINE Lane<double> fused(Lane<double> a, Lane<double> b, Lane<double> c) {
  return {::fma(a.v, b.v, c.v)};
}
ZR_HOST_DEVICE ZR_INLINE Lane<float> root(Lane<float> a) {
  return {::sqrtf(a.v)};
}
ZR_HOST_DEVICE ZR_INLINE Lane<double> root(Lane<double> a) {
  return {::sqrt(a.v)};
}
ZR_HOST_DEVICE ZR_INLINE Lane<float> canonical(Lane<float> a) {
  return {a.v != a.v ? __builtin_bit_cast(float, kQuietNan32) : a.v};
}
ZR_HOST_DEVICE ZR_INLINE Lane<double> canonical(Lane<double> a) {
  return {a.v != a.v ? __builtin_bit_cast(double, kQuietNan64) : a.v};
}
ZR_HOST_DEVICE ZR_INLINE Lane<std::uint32_t> canonical(Lane<std::uint32_t> a) {
  return a;
}
ZR_HOST_DEVICE ZR_INLINE Lane<std::uint64_t> canonical(Lane<std::uint64_t> a) {
  return a;
}

}  // namespace
}  // namespace zeroth::kernels
