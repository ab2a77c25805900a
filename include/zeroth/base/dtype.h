// Element types that Zeroth moves and computes with.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zeroth {

enum class DType : std::uint8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32, kUInt8 };

[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

/// Bytes of an array; `elements` must not be negative.
[[nodiscard]] constexpr std::size_t array_bytes(std::int64_t elements, DType dtype) noexcept {
  return static_cast<std::size_t>(elements) * size_of(dtype);
}

[[nodiscard]] constexpr bool is_floating(DType dtype) noexcept {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

/// True for dtypes of trained parameters and gradients. The gradients of float16 need a loss scale
/// (optim/loss_scaler.h).
[[nodiscard]] constexpr bool is_trained(DType dtype) noexcept {
  return is_floating(dtype);
}

/// "float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8".
[[nodiscard]] std::string_view name_of(DType dtype) noexcept;

/// Dtype of sums and master weights for values of `dtype`: fp64 for fp64; fp32 for fp32, bf16 and fp16; else `dtype`.
[[nodiscard]] constexpr DType accumulation_dtype(DType dtype) noexcept {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? DType::kFloat32 : dtype;
}

/// bfloat16 storage: the upper half of a float. Conversion from float rounds to nearest even; NaN stays NaN (quiet).
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  explicit constexpr BFloat16(float value) noexcept : bits(round_bits(std::bit_cast<std::uint32_t>(value))) {}
  explicit constexpr operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
  }
  bool operator==(const BFloat16&) const = default;

  [[nodiscard]] static constexpr std::uint16_t round_bits(std::uint32_t x) noexcept {
    if ((x & 0x7fffffffU) > 0x7f800000U) {
      return static_cast<std::uint16_t>((x >> 16U) | 0x40U);
    }
    return static_cast<std::uint16_t>((x + 0x7fffU + ((x >> 16U) & 1U)) >> 16U);
  }
};
static_assert(sizeof(BFloat16) == 2);

/// IEEE 754 binary16 storage: 1 sign, 5 exponent, 10 mantissa bits. Conversion from float rounds to nearest even, above
/// 65,519.99... to infinity; every value is a float; a NaN stays a NaN (quiet, upper payload bits kept) in both
/// directions.
struct Float16 {
  std::uint16_t bits = 0;

  Float16() = default;
  explicit constexpr Float16(float value) noexcept : bits(round_bits(std::bit_cast<std::uint32_t>(value))) {}
  explicit constexpr operator float() const noexcept { return std::bit_cast<float>(widen_bits(bits)); }
  bool operator==(const Float16&) const = default;

  [[nodiscard]] static constexpr std::uint16_t round_bits(std::uint32_t x) noexcept {
    const std::uint32_t sign = (x >> 16U) & 0x8000U;
    const std::uint32_t magnitude = x & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13U) & 0x3ffU));
    if (magnitude >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // 2^16 and above
    if (magnitude >= 0x38800000U) {                                                   // normal: 2^-14 and above
      const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13U) & 1U);
      return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13U));
    }
    const std::uint32_t exponent = magnitude >> 23U;
    if (exponent < 102) return static_cast<std::uint16_t>(sign);  // below half of the smallest denormal, 2^-24
    const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t shift = 126U - exponent;
    const std::uint32_t kept = mantissa >> shift;
    const std::uint32_t rest = mantissa & ((1U << shift) - 1U);
    const std::uint32_t half = 1U << (shift - 1U);
    return static_cast<std::uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1U) != 0) ? 1U : 0U)));
  }

  [[nodiscard]] static constexpr std::uint32_t widen_bits(std::uint16_t half) noexcept {
    const std::uint32_t sign = (half & 0x8000U) << 16U;
    const std::uint32_t exponent = (half >> 10U) & 0x1fU;
    const std::uint32_t mantissa = half & 0x3ffU;
    if (exponent == 0x1f) return sign | 0x7f800000U | (mantissa << 13U) | (mantissa != 0 ? 0x400000U : 0U);
    if (exponent != 0) return sign | ((exponent + 112U) << 23U) | (mantissa << 13U);
    return sign | std::bit_cast<std::uint32_t>(static_cast<float>(mantissa) * 0x1p-24F);  // exact
  }
};
static_assert(sizeof(Float16) == 2);

// [Note: Masters in two halves]
// The fp32 master of a bfloat16 parameter is stored as the parameter itself (high) and the remaining 16 bits (low).
// With m the bits of the master:  high = (m + 0x8000) >> 16,  low = m mod 2^16 as a signed number,  m = (high << 16) +
// low. The parameter is the master rounded to nearest, ties away from zero, and no bit of the master is lost:
// infinities, denormals, zeros of both signs and masters whose parameter overflows to infinity come back, and so does
// the canonical NaN, the only one that our kernels make. Rounding ties to even would need one value more than 16 bits
// have. Ref: Kalamkar et al.: Optimizing Deep Learning Recommender Systems' Training on CPU Cluster Architectures,
// arXiv 2005.04680, IV-B (Split-SGD-BF16), which truncates instead of rounding.

/// The fp32 master of two halves. With low == 0 it is the value of `high`.
[[nodiscard]] constexpr float join_master(BFloat16 high, std::int16_t low) noexcept {
  return std::bit_cast<float>((static_cast<std::uint32_t>(high.bits) << 16U) +
                              static_cast<std::uint32_t>(static_cast<std::int32_t>(low)));
}

/// Splits an fp32 master into its two halves. `master` may be NaN only if it is the canonical NaN.
constexpr void split_master(float master, BFloat16& high, std::int16_t& low) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(master);
  high.bits = static_cast<std::uint16_t>((bits + 0x8000U) >> 16U);
  low = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
}

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<std::int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kUInt8;
};

}  // namespace zeroth
