// Codes of four vectors at once: the interface of quant_wide_avx2.h and quant_wide_avx512.h, and what their quotients
// are good for.
//
// [Note: Quotients without a division]
// A vector of divisions takes as long as ten other operations. q = c / s is here n + (c - n s) r, with r = 1 / s and
// n = c r, each rounded once and the sums in brackets fused. For scales in [kLeastFast, kMostFast] it is the rounded
// quotient wherever that decides between two values of a format: both were compared for all 2^23 mantissas of s, with
// the five numbers c around each border of each format: 5.3e9 pairs, no difference. Without the correction 28 % of them
// differ. Codes.RoundAtBordersAsADivisionDoesWithAnyScale compares some.
#pragma once

#include <kernels/common/arch.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// The vectors of an instruction set, with Bits for the same as integers. The variant for single lanes has none.
///
/// - quotient(c, s, 1 / s): see above.
/// - words(a, b): integers of both as 16 bits, in an order that store_bytes() and store_halves() undo.
/// - load_pairs(p): a byte of two codes of 4 bits in each lane; Table::of(values, scale) has the products of the 16
///   values; lower() and upper() are those of the codes in the lower and upper halves.
/// - in_order(even, odd): the elements of both, one of each in turn.
/// - load_e4m3(p, first, second): the values / 2^8, NaN where the code is one.
template <template <class> class V>
struct WideCodes {
  static constexpr bool kThere = false;
};

/// Vectors of a group.
inline constexpr int kGroupVectors = 4;

/// Scales of blocks that are divided by quotient(). Of smaller ones the rest (c - n s) may be rounded, where q matters;
/// of greater ones 1 / s.
inline constexpr float kLeastFast = 0x1p-90F;
inline constexpr float kMostFast = 0x1p120F;

/// A code of e4m3, 7 bits up, is a float16 of a 2^-8 of its value.
inline constexpr short kHalfParts = static_cast<short>(0xbf80);
inline constexpr short kHalfSign = static_cast<short>(0x8000);
inline constexpr short kHalfNanCode = 0x3f80;
inline constexpr short kHalfNan = 0x7e00;
inline constexpr float kHalfScale = 0x1p8F;

}  // namespace
}  // namespace zeroth::kernels
