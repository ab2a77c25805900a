// Element types that Zeroth moves and computes with.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace zeroth {

enum class DType : std::uint8_t { kFloat64, kFloat32, kBFloat16, kInt64, kInt32, kUInt8 };

[[nodiscard]] constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kBFloat16: return 2;
    case DType::kUInt8: return 1;
  }
  return 0;
}

/// Bytes of an array; `elements` must not be negative.
[[nodiscard]] constexpr std::size_t array_bytes(std::int64_t elements, DType dtype) noexcept {
  return static_cast<std::size_t>(elements) * size_of(dtype);
}

[[nodiscard]] constexpr bool is_floating(DType dtype) noexcept {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kBFloat16;
}

/// "float64", "float32", "bfloat16", "int64", "int32", "uint8".
[[nodiscard]] std::string_view name_of(DType dtype) noexcept;

/// Type in which values of `dtype` are summed and kept as master weights: fp64 for fp64, fp32 for fp32 and bf16, else itself.
[[nodiscard]] constexpr DType accumulation_dtype(DType dtype) noexcept {
  return dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
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

// [Note: Masters in two halves]
// The fp32 master of a bfloat16 parameter is kept as the parameter itself (high) and the 16 bits that it lacks (low). With m the bits of
// the master:  high = (m + 0x8000) >> 16,  low = m mod 2^16 as a signed number,  m = (high << 16) + low.
// The parameter is the master rounded to nearest, ties away from zero, and no bit of the master is lost: infinities, denormals, zeros of both
// signs and masters whose parameter overflows to infinity come back, and so does the canonical NaN, the only one that our kernels make.
// Rounding ties to even would need one value more than 16 bits have.
// Ref: Kalamkar et al.: Optimizing Deep Learning Recommender Systems' Training on CPU Cluster Architectures, arXiv 2005.04680, IV-B
// (Split-SGD-BF16), which truncates instead of rounding.

/// Any `high` with low 0 stands for its own value.
[[nodiscard]] constexpr float join_master(BFloat16 high, std::int16_t low) noexcept {
  return std::bit_cast<float>((static_cast<std::uint32_t>(high.bits) << 16U) + static_cast<std::uint32_t>(static_cast<std::int32_t>(low)));
}

/// Of NaNs the canonical one only.
constexpr void split_master(float master, BFloat16& high, std::int16_t& low) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(master);
  high.bits = static_cast<std::uint16_t>((bits + 0x8000U) >> 16U);
  low = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
}

template <class T>
struct DTypeOf;
template <> struct DTypeOf<double> { static constexpr DType value = DType::kFloat64; };
template <> struct DTypeOf<float> { static constexpr DType value = DType::kFloat32; };
template <> struct DTypeOf<BFloat16> { static constexpr DType value = DType::kBFloat16; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::kInt64; };
template <> struct DTypeOf<std::int32_t> { static constexpr DType value = DType::kInt32; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::kUInt8; };

}  // namespace zeroth
