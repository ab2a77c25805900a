#include <zeroth/base/dtype.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>

namespace zeroth {
namespace {

constexpr std::array<DType, 7> kAll{DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                    DType::kInt64,   DType::kInt32,   DType::kUInt8};

TEST(DType, SizesAndNamesAreThoseOfTheTypes) {
  EXPECT_EQ(size_of(DType::kFloat64), sizeof(double));
  EXPECT_EQ(size_of(DType::kFloat32), sizeof(float));
  EXPECT_EQ(size_of(DType::kBFloat16), sizeof(BFloat16));
  EXPECT_EQ(size_of(DType::kFloat16), sizeof(Float16));
  EXPECT_EQ(size_of(DType::kInt64), sizeof(std::int64_t));
  EXPECT_EQ(size_of(DType::kInt32), sizeof(std::int32_t));
  EXPECT_EQ(size_of(DType::kUInt8), sizeof(std::uint8_t));
  std::set<std::string_view> names;
  for (const DType dtype : kAll) names.insert(name_of(dtype));
  EXPECT_EQ(names,
            (std::set<std::string_view>{"float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8"}));
}

TEST(DType, AccumulatesInAtLeastFloat32) {
  EXPECT_EQ(accumulation_dtype(DType::kBFloat16), DType::kFloat32);
  for (const DType dtype : kAll) {
    const bool half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
    EXPECT_EQ(accumulation_dtype(dtype), half ? DType::kFloat32 : dtype);
    EXPECT_EQ(is_trained(dtype), is_floating(dtype));
    EXPECT_EQ(is_floating(dtype), name_of(dtype).find("float") != std::string_view::npos);
  }
}

/// The neighbour of `x` on the grid of bfloat16 by exact arithmetic: no bit tricks shared with the code under
/// test.
std::uint16_t nearest_even(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const auto down = static_cast<std::uint16_t>(bits >> 16U);  // toward zero
  const auto value = [](std::uint32_t pattern) {  // of a finite pattern, or of the "2^128" above the largest
    if ((pattern & 0x7fffU) == 0x7f80U) return std::copysign(std::ldexp(1.0, 128), pattern & 0x8000U ? -1.0 : 1.0);
    return static_cast<double>(std::bit_cast<float>(pattern << 16U));
  };
  const auto up = static_cast<std::uint16_t>(down + 1U);
  const double below = std::fabs(static_cast<double>(x) - value(down));
  const double above = std::fabs(value(up) - static_cast<double>(x));
  if (below != above) return below < above ? down : up;
  return (down & 1U) == 0 ? down : up;
}

/// The value of a finite binary16 pattern by the formula of IEEE 754.
double value_of_half(std::uint32_t pattern) {
  const int exponent = static_cast<int>((pattern >> 10U) & 0x1fU);
  const auto mantissa = static_cast<double>(pattern & 0x3ffU);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  return (pattern & 0x8000U) != 0 ? -magnitude : magnitude;
}

TEST(Float16, WideningIsTheFormulaAndNarrowingGivesEveryPatternBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    Float16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const auto wide = static_cast<float>(value);
    if ((bits & 0x7fffU) > 0x7c00U) {
      ASSERT_TRUE(std::isnan(wide)) << std::hex << bits;
      ASSERT_EQ(Float16(wide).bits, bits | 0x200U) << "quiet, sign and payload kept";
      continue;
    }
    if ((bits & 0x7fffU) == 0x7c00U) {
      ASSERT_TRUE(std::isinf(wide) && std::signbit(wide) == (bits > 0x7fffU));
    } else {
      ASSERT_EQ(static_cast<double>(wide), value_of_half(bits)) << std::hex << bits;
      ASSERT_EQ(std::signbit(wide), bits > 0x7fffU);
    }
    ASSERT_EQ(Float16(wide).bits, bits) << std::hex << bits;
  }
}

TEST(Float16, RoundsToTheNearestAndAtTheMiddleToEven) {
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // the largest is 65,504; the next would be 65,536
    const double below = value_of_half(bits);
    const double above = bits == 0x7bff ? 65536.0 : value_of_half(bits + 1);
    const auto middle = static_cast<float>((below + above) / 2);  // exact: 12 bits
    const auto rounded = [](float x) { return static_cast<std::uint32_t>(Float16(x).bits); };
    ASSERT_EQ(rounded(std::nextafter(middle, 0.0F)), bits);
    ASSERT_EQ(rounded(middle), bits % 2 == 0 ? bits : bits + 1);
    ASSERT_EQ(rounded(std::nextafter(middle, 1e9F)), bits + 1);
    ASSERT_EQ(rounded(-middle), 0x8000U | rounded(middle));
  }
  EXPECT_EQ(Float16(1e30F).bits, 0x7c00);
  EXPECT_EQ(Float16(-std::numeric_limits<float>::infinity()).bits, 0xfc00);
  EXPECT_EQ(Float16(std::numeric_limits<float>::denorm_min()).bits, 0);
}

TEST(BFloat16, RoundsEveryUpperHalfWithEveryInterestingLowerHalf) {
  constexpr std::array<std::uint32_t, 11> kLows{0x0000, 0x0001, 0x0002, 0x3fff, 0x7ffe, 0x7fff,
                                                0x8000, 0x8001, 0xc000, 0xfffe, 0xffff};
  for (std::uint32_t high = 0; high < 65536; ++high) {
    for (const std::uint32_t low : kLows) {
      const std::uint32_t bits = (high << 16U) | low;
      const std::uint16_t rounded = BFloat16::round_bits(bits);
      if ((bits & 0x7fffffffU) > 0x7f800000U) {
        ASSERT_GT(rounded & 0x7fffU, 0x7f80U) << std::hex << bits << ": NaN must stay NaN";
        ASSERT_EQ(rounded & 0x40U, 0x40U) << std::hex << bits << ": and become quiet";
        ASSERT_EQ(rounded >> 15U, high >> 15U) << std::hex << bits << ": and keep its sign";
      } else if ((bits & 0x7fffffffU) == 0x7f800000U) {
        ASSERT_EQ(rounded, high) << std::hex << bits;
      } else {
        ASSERT_EQ(rounded, nearest_even(std::bit_cast<float>(bits))) << std::hex << bits;
      }
    }
  }
}

TEST(BFloat16, WideningAndNarrowingGivesEveryPatternBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    BFloat16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const auto wide = static_cast<float>(value);
    const BFloat16 back(wide);
    if (std::isnan(wide)) {
      EXPECT_EQ(back.bits, bits | 0x40U);
    } else {
      EXPECT_EQ(back.bits, bits);
    }
  }
}

TEST(BFloat16, LargeFloatsRoundToInfinity) {
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(BFloat16(-std::numeric_limits<float>::max()).bits, 0xff80);
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::denorm_min()).bits, 0);
  EXPECT_EQ(BFloat16(-0.0F).bits, 0x8000);
}

RC_GTEST_PROP(BFloat16Property, RoundsAnyFiniteFloatToNearestEven, ()) {
  const auto bits = *rc::gen::arbitrary<std::uint32_t>();
  RC_PRE((bits & 0x7f800000U) != 0x7f800000U);
  RC_ASSERT(BFloat16::round_bits(bits) == nearest_even(std::bit_cast<float>(bits)));
}

/// Nearest bfloat16, ties away from zero, found by distances in double.
std::uint16_t nearest(float master) {
  const auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(master) >> 16U);  // towards zero
  const auto above = static_cast<std::uint16_t>(below + 1);
  const auto value = [](std::uint16_t half) {
    // One step beyond the largest finite number counts as the power of two that it would be.
    if ((half & 0x7fffU) == 0x7f80U) return std::copysign(0x1p128, (half & 0x8000U) != 0 ? -1.0 : 1.0);
    return static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16U));
  };
  const double to_below = std::abs(static_cast<double>(master) - value(below));
  return std::abs(static_cast<double>(master) - value(above)) <= to_below ? above : below;
}

TEST(Master, HalvesLoseNothingAndTheUpperOneIsTheNearestBfloat16ForEveryTailOfManyHeads) {
  for (const std::uint32_t head : {0x0000U, 0x0001U, 0x007fU, 0x0080U, 0x3f7fU, 0x3f80U, 0x3f81U, 0x7f7eU, 0x7f7fU,
                                   0x8000U, 0x807fU, 0xbf80U, 0xbfffU, 0xff7fU}) {
    for (std::uint32_t tail = 0; tail < 65536; ++tail) {
      const auto master = std::bit_cast<float>((head << 16U) | tail);
      BFloat16 high;
      std::int16_t low = 0;
      split_master(master, high, low);
      ASSERT_EQ(high.bits, nearest(master)) << std::hex << ((head << 16U) | tail);
      ASSERT_EQ(std::bit_cast<std::uint32_t>(join_master(high, low)), (head << 16U) | tail);
    }
  }
}

TEST(Master, EveryBfloat16IsItsOwnMasterAndInfinitiesAndTheQuietNanComeBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    BFloat16 high;
    high.bits = static_cast<std::uint16_t>(bits);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(join_master(high, 0)), bits << 16U);
  }
  using Limits = std::numeric_limits<float>;
  for (const float special : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), -0.0F}) {
    BFloat16 high;
    std::int16_t low = 1;
    split_master(special, high, low);
    EXPECT_EQ(high, BFloat16(special));
    EXPECT_EQ(low, 0);
  }
}

}  // namespace
}  // namespace zeroth
