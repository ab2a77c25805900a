// Blocks of numbers as codes of 8 or 4 bits with one scale a block, and the error that they leave.
//
//   message   c = source [+ error]
//   scale     s = max |c| of the block / Q, Q = the greatest value of the format
//   value     q = c / s, rounded to a value of the format: to nearest, or by a hash of seed and element
//   error     c - q s
//   result    q s
//
// | format | values q | Q |
// |---|---|---|
// | kInt8 | integers in two's complement | 127 |
// | kInt4 | the same | 7 |
// | kE4M3 | sign, 4 bits of exponent, 3 of mantissa: (1 + m / 8) 2^(e - 7), where e = 0: m 2^-9 | 448 |
// | kE3M0 | sign, 3 bits of exponent: 2^(e - 3), where e = 0: zero | 16 |
//
// To nearest: of two values that are as near the one whose last digit is even; numbers of kE3M0 have one digit, so
// there the greater magnitude, but zero before the smallest one, as IEEE 754 says of a precision of one digit.
// Stochastic: floor(c / s / step + u) step with u in [0, 1), step the distance of the two values around c / s, then at
// most Q in magnitude. No code of -0 is made, and none above Q: codes 0x7f and 0xff of kE4M3 are NaN, -128 and -8 are
// what they are, codes of -0 are zeros.
//
// A block whose s is below the smallest normal number has s = 0 and codes 0. A block with an infinite or NaN message
// has the scale NaN, which its results keep, and its errors stay as they were. Symmetric, so a sum of codes has no
// offset. Refs: Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022; Wang et al., "ZeRO++", 2023
// (qwZ, qgZ); Xie et al., "LoCo", 2024 (error feedback); Micikevicius et al., "FP8 Formats for Deep Learning", 2022
// (E4M3); Douillard et al., "Streaming DiLoCo", 2025 (E3M0).
//
// Codes of 4 bits are two a byte, element 2 j in the lower half; the last upper half of an odd count is 0. All run on
// the calling thread. The bits do not depend on the split of a range into calls, at block boundaries, or on `isa`. All
// throw Error{kUsage} for n < 0, a block that is no positive multiple of 16, another dtype, or an unsupported isa.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

enum class CodeFormat : std::uint8_t { kInt8, kInt4, kE4M3, kE3M0 };

/// True if a code is half a byte.
[[nodiscard]] constexpr bool is_half(CodeFormat format) noexcept {
  return format == CodeFormat::kInt4 || format == CodeFormat::kE3M0;
}
/// Bytes of the codes of n elements.
[[nodiscard]] constexpr std::int64_t code_bytes(std::int64_t n, CodeFormat format) noexcept {
  return is_half(format) ? (n + 1) / 2 : n;
}
/// Scales of n elements.
[[nodiscard]] constexpr std::int64_t code_blocks(std::int64_t n, std::int64_t block) noexcept {
  return (n + block - 1) / block;
}

struct Stochastic {
  bool enabled = false;
  std::uint32_t seed = 0;
  std::uint32_t first = 0;  ///< number of the range's element 0, for the hash
};

struct QuantizeArgs {
  std::uint8_t* codes = nullptr;  ///< [code_bytes(n, format)]
  float* scales = nullptr;        ///< [code_blocks(n, block)]
  const void* src = nullptr;      ///< [n] of src_dtype: float32, bfloat16 or float16
  DType src_dtype = DType::kFloat32;
  float* error = nullptr;  ///< [n] or null
  std::int64_t n = 0;
  std::int64_t block = 256;
  CodeFormat format = CodeFormat::kInt8;
  Stochastic stochastic{};
};
void quantize(const QuantizeArgs& args, Isa isa);

struct QuantSource {
  const std::uint8_t* codes = nullptr;
  const float* scales = nullptr;
};

/// dst[i] = ((v0 + v1) + v2 ...) * factor, of the values of the sources in their order. One source and factor 1 give
/// its values.
struct DequantizeArgs {
  void* dst = nullptr;  ///< [n] of dst_dtype: float32, or bfloat16 or float16, rounded to nearest even
  DType dst_dtype = DType::kFloat32;
  const QuantSource* sources = nullptr;
  int num_sources = 0;  ///< 1 or more
  std::int64_t n = 0;
  std::int64_t block = 256;
  CodeFormat format = CodeFormat::kInt8;
  float factor = 1.0F;
};
void dequantize(const DequantizeArgs& args, Isa isa);

/// dequantize() to float32 and quantize() of that in one pass: what a rank sends on that has summed what others sent.
/// `quantize.src` is not read; n and block are those of `sum`. `sum.dst` may be null; else the sum is kept there.
struct RequantizeArgs {
  DequantizeArgs sum{};
  QuantizeArgs quantize{};
};
void requantize(const RequantizeArgs& args, Isa isa);

}  // namespace zeroth::kernels
