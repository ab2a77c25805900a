#include "kernel_test_support.h"

#include <kernels/norm/norm.h>
#include <zeroth/base/error.h>

#include <cmath>
#include <numeric>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
NormAccumulator norm_of(const T* data, std::int64_t n, Isa isa) {
  NormAccumulator norm;
  norm.add(data, DTypeOf<T>::value, n, isa);
  return norm;
}

/// The block sum as norm.h defines it, in plain scalar code.
template <class T>
double block_sum(const T* data, std::int64_t n) {
  std::array<double, 32> lane{};
  for (std::int64_t i = 0; i < kNormBlock; ++i) {
    const double x = i < n ? to_double(data[i]) : 0.0;
    auto& sum = lane[static_cast<std::size_t>(i % 32)];
    sum = std::fma(x, x, sum);
  }
  for (std::size_t half = 16; half > 0; half /= 2) {
    for (std::size_t l = 0; l < half; ++l) {
      lane[l] += lane[l + half];
    }
  }
  return lane[0];
}

/// A norm that holds one given double exactly: fp64 element whose square is a power of two.
NormAccumulator power_of_two(int even_exponent) {
  const double root = std::ldexp(1.0, even_exponent / 2);
  return norm_of(&root, 1, Isa::kScalar);
}

template <class T>
class Norm : public ::testing::Test {};
using ElementTypes = ::testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(Norm, ElementTypes);

TYPED_TEST(Norm, BlocksFollowTheDefinedOrderOnRandomPatterns) {
  constexpr std::int64_t kBlocks = 9766;  // 1e7 elements
  RandomPatterns random(kSeed);
  GuardedArray<TypeParam> block(kNormBlock);
  std::int64_t nonfinite = 0;
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    random.fill(block);
    if (b % 4 != 0) {  // any bits are almost never 1,024 finite numbers
      for (std::int64_t i = 0; i < kNormBlock; ++i) {
        const auto x = to_double(block[i]);
        block[i] = std::isfinite(x * x * 1e6) ? block[i] : TypeParam{};
      }
    }
    const double want = block_sum(block.data(), kNormBlock);
    nonfinite += std::isfinite(want) ? 0 : 1;
    for (const Isa isa : supported_isas()) {
      const NormAccumulator norm = norm_of(block.data(), kNormBlock, isa);
      if (std::isfinite(want)) {
        ASSERT_EQ(bits_of(norm.sum_of_squares()), bits_of(want)) << name_of(isa) << " block " << b;
      } else {
        ASSERT_EQ(norm.nonfinite_blocks(), 1) << name_of(isa) << " block " << b;
      }
    }
  }
  EXPECT_GT(nonfinite, 0);
  EXPECT_LT(nonfinite, kBlocks / 2);
}

TYPED_TEST(Norm, EveryTailLengthCountsMissingElementsAsZeros) {
  GuardedArray<TypeParam> data(kNormBlock + 130, 1);
  for (std::int64_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<TypeParam>(static_cast<float>(i % 97) - 48.25F);
  }
  for (std::int64_t n = 0; n <= kNormBlock + 130; n += n < 130 || n >= kNormBlock - 2 ? 1 : 37) {
    const double want = n <= kNormBlock ? block_sum(data.data(), n)
                                        : block_sum(data.data(), kNormBlock) +
                                              block_sum(data.data() + kNormBlock, n - kNormBlock);  // exact here
    for (const Isa isa : supported_isas()) {
      const NormAccumulator norm = norm_of(data.data(), n, isa);
      ASSERT_EQ(norm.sum_of_squares(), want) << name_of(isa) << " n " << n;
      ASSERT_EQ(norm.num_blocks(), (n + kNormBlock - 1) / kNormBlock);
    }
  }
}

TYPED_TEST(Norm, NoSplitOrderOrGroupingChangesABit) {
  constexpr std::int64_t kBlocks = 300;
  constexpr std::int64_t kN = kBlocks * kNormBlock - 501;
  RandomPatterns random(kSeed);
  GuardedArray<TypeParam> data(kN);
  for (std::int64_t i = 0; i < kN; ++i) {  // magnitudes from 2^-60 to 2^60
    const auto draw = random.engine()();
    data[i] = static_cast<TypeParam>(
        std::ldexp(1.0F + static_cast<float>(draw >> 41U) * 0x1p-23F, static_cast<int>(draw % 121) - 60));
  }
  const NormAccumulator whole = norm_of(data.data(), kN, best_isa());
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<std::int64_t> order(kBlocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine());
    const std::size_t num_ranks = 1 + random.engine()() % 7;
    std::vector<NormAccumulator> ranks(num_ranks);
    for (std::size_t k = 0; k < order.size(); ++k) {
      const std::int64_t at = order[k] * kNormBlock;
      ranks[k % num_ranks].add(data.data() + at, DTypeOf<TypeParam>::value, std::min(kNormBlock, kN - at),
                               supported_isas().back());
    }
    NormAccumulator summed;  // as an all_reduce of the words does it
    for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
      for (std::size_t w = 0; w < NormAccumulator::kWords; ++w) {
        summed.words()[w] += rank->words()[w];
      }
    }
    NormAccumulator merged;
    for (const NormAccumulator& rank : ranks) {
      merged.merge(rank);
    }
    ASSERT_TRUE(summed == whole) << "trial " << trial << " seed " << kSeed;
    ASSERT_TRUE(merged == whole) << "trial " << trial << " seed " << kSeed;
    ASSERT_EQ(bits_of(summed.sum_of_squares()), bits_of(whole.sum_of_squares()));
    ASSERT_EQ(summed.num_blocks(), kBlocks);
  }
}

TYPED_TEST(Norm, AgreesWithLongDouble) {
  constexpr std::int64_t kN = 100'003;
  GuardedArray<TypeParam> data(kN);
  std::mt19937_64 engine(kSeed);
  long double want = 0;
  for (std::int64_t i = 0; i < kN; ++i) {
    data[i] = static_cast<TypeParam>(static_cast<float>(static_cast<int>(engine() % 20001) - 10000) * 1e-4F);
    const auto x = static_cast<long double>(to_double(data[i]));
    want += x * x;
  }
  const NormAccumulator norm = norm_of(data.data(), kN, best_isa());
  EXPECT_LE(std::abs(static_cast<long double>(norm.sum_of_squares()) - want), want * 38 * 0x1p-53L);
  EXPECT_DOUBLE_EQ(norm.l2_norm(), std::sqrt(norm.sum_of_squares()));
}

TEST(NormRange, CoversDenormalsAndTheLargestNumbers) {
  const std::vector<float> smallest(3, std::numeric_limits<float>::denorm_min());  // (2^-149)^2 = 2^-298
  EXPECT_EQ(norm_of(smallest.data(), 3, best_isa()).sum_of_squares(), 3 * 0x1p-298);
  const std::vector<float> largest(2048, std::numeric_limits<float>::max());
  const double square = std::ldexp(1.0 - 0x1p-24, 128) * std::ldexp(1.0 - 0x1p-24, 128);  // exact: 48 bits
  EXPECT_EQ(norm_of(largest.data(), 2048, best_isa()).sum_of_squares(), 2048 * square);
  const std::vector<double> small(2, 0x1p-537);  // squares: the smallest denormal double
  EXPECT_EQ(norm_of(small.data(), 2, best_isa()).sum_of_squares(), 0x1p-1073);
  const double huge = 0x1.fffffep511;
  EXPECT_EQ(norm_of(&huge, 1, best_isa()).sum_of_squares(), huge * huge);
  const std::vector<double> beyond(8192, 0x1p511);  // 8 blocks of 2^1032 / ... : each block overflows double
  EXPECT_EQ(norm_of(beyond.data(), 8192, best_isa()).nonfinite_blocks(), 8);
}

TEST(NormRange, ASumBeyondDoubleIsInfiniteThoughEveryBlockIsFinite) {
  NormAccumulator norm;
  for (int k = 0; k < 4; ++k) {
    norm.merge(power_of_two(1022));
  }
  EXPECT_EQ(norm.nonfinite_blocks(), 0);
  EXPECT_EQ(norm.sum_of_squares(), std::numeric_limits<double>::infinity());
}

TEST(NormRounding, TiesGoToEvenAndTheSmallestRestBreaksThem) {
  const auto sum = [](std::initializer_list<int> exponents) {
    NormAccumulator norm;
    for (const int e : exponents) {
      norm.merge(power_of_two(e));
    }
    return norm.sum_of_squares();
  };
  EXPECT_EQ(sum({52, -2}), 0x1p52);               // below half: down
  EXPECT_EQ(sum({54, 0, 0}), 0x1p54);             // a tie, even below: down
  EXPECT_EQ(sum({54, 0, 0, -1074}), 0x1p54 + 4);  // above half by the smallest rest: up
  EXPECT_EQ(sum({54, 2, 0, 0}), 0x1p54 + 8);      // a tie, odd below: up
  EXPECT_EQ(sum({1000, -1000}), 0x1p1000);
  EXPECT_EQ(sum({}), 0.0);
}

TEST(NormCarry, ManyEqualBlocksAddExactly) {
  NormAccumulator norm = power_of_two(0);
  double want = 1.0;
  for (int doubling = 0; doubling < 30; ++doubling) {
    norm.merge(NormAccumulator(norm));
    want *= 2;
    ASSERT_EQ(norm.sum_of_squares(), want);
  }
  const std::vector<float> ones(5 * 64 * 1024, 1.0F);
  EXPECT_EQ(norm_of(ones.data(), static_cast<std::int64_t>(ones.size()), best_isa()).sum_of_squares(), 5.0 * 64 * 1024);
}

TYPED_TEST(Norm, NonFiniteBlocksAreCountedApart) {
  for (const Isa isa : supported_isas()) {
    GuardedArray<TypeParam> data(5 * kNormBlock);
    data[3] = static_cast<TypeParam>(std::numeric_limits<float>::infinity());
    data[2 * kNormBlock + 1023] = static_cast<TypeParam>(std::numeric_limits<float>::quiet_NaN());
    data[2 * kNormBlock + 7] = static_cast<TypeParam>(-std::numeric_limits<float>::infinity());
    data[4 * kNormBlock] = static_cast<TypeParam>(2.0F);
    const NormAccumulator norm = norm_of(data.data(), data.size(), isa);
    EXPECT_EQ(norm.nonfinite_blocks(), 2) << name_of(isa);
    EXPECT_EQ(norm.sum_of_squares(), std::numeric_limits<double>::infinity());
    EXPECT_EQ(norm.l2_norm(), std::numeric_limits<double>::infinity());
  }
}

TEST(NormEnvironment, CallersFloatingPointEnvironmentChangesNothing) {
  GuardedArray<double> data(5000);
  RandomPatterns random(kSeed);
  for (std::int64_t i = 0; i < data.size(); ++i) {
    data[i] = std::ldexp(static_cast<double>(random.engine()() >> 11U), -590);  // many squares are denormal
  }
  for (const Isa isa : supported_isas()) {
    const NormAccumulator want = norm_of(data.data(), data.size(), isa);
    const double root = want.l2_norm();
    NormAccumulator got;
    double hostile_root = 0;
    {
      const HostileEnvironment hostile;
      got = norm_of(data.data(), data.size(), isa);
      hostile_root = got.l2_norm();
    }
    EXPECT_TRUE(want == got) << name_of(isa);
    EXPECT_EQ(bits_of(root), bits_of(hostile_root)) << name_of(isa);
  }
}

TEST(NormErrors, RefusesWhatItCannotDo) {
  NormAccumulator norm;
  const std::int64_t value = 0;
  EXPECT_THROW(norm.add(&value, DType::kInt64, 1, Isa::kScalar), Error);
  EXPECT_THROW(norm.add(&value, DType::kFloat64, -1, Isa::kScalar), Error);
}

}  // namespace
}  // namespace zeroth::kernels
