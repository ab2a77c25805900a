#include "kernel_test_support.h"

#include <kernels/cast/cast.h>
#include <kernels/copy/copy.h>
#include <zeroth/base/error.h>

#include <cmath>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class Out, class In>
void cast(GuardedArray<Out>& dst, const GuardedArray<In>& src, Isa isa) {
  cast_range(dst.data(), DTypeOf<Out>::value, src.data(), DTypeOf<In>::value, src.size(), isa);
}

TEST(Cast, FloatToBfloat16RoundsToNearestEvenOnRandomPatterns) {
  constexpr std::int64_t kChunk = 199'999;
  RandomPatterns random(kSeed);
  for (std::int64_t done = 0; done < 10'000'000; done += kChunk) {
    GuardedArray<float> src(kChunk, 1);
    random.fill(src);
    GuardedArray<BFloat16> want(kChunk);
    for (std::int64_t i = 0; i < kChunk; ++i) {
      want[i].bits = BFloat16::round_bits(bits_of(src[i]));
    }
    for (const Isa isa : supported_isas()) {
      GuardedArray<BFloat16> got(kChunk, done == 0 ? 9 : 0);
      cast(got, src, isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " seed " << kSeed;
    }
  }
}

TEST(Cast, EveryBfloat16IsExactInFloatAndDoubleAndComesBack) {
  GuardedArray<BFloat16> all(65536);
  for (std::int64_t i = 0; i < all.size(); ++i) {
    all[i].bits = static_cast<std::uint16_t>(i);
  }
  for (const Isa isa : supported_isas()) {
    GuardedArray<float> wide(all.size());
    GuardedArray<double> wider(all.size());
    GuardedArray<BFloat16> back(all.size());
    cast(wide, all, isa);
    cast(wider, all, isa);
    cast(back, wide, isa);
    for (std::int64_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(bits_of(wide[i]), static_cast<std::uint32_t>(i) << 16U);
      const float value = wide[i];
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(wider[i]));
        ASSERT_EQ(back[i].bits, all[i].bits | 0x40U);
      } else {
        ASSERT_EQ(wider[i], static_cast<double>(value));
        ASSERT_EQ(back[i].bits, all[i].bits);
      }
    }
  }
}

template <class In, class Out>
void expect_same_casts(std::uint64_t seed) {
  constexpr std::int64_t kChunk = 99'991;
  RandomPatterns random(seed);
  for (std::int64_t done = 0; done < 10'000'000; done += kChunk) {
    GuardedArray<In> src(kChunk);
    random.fill(src);
    GuardedArray<Out> want(kChunk);
    cast(want, src, Isa::kScalar);
    for (std::int64_t i = 0; i < kChunk; ++i) {
      if (!std::isnan(src[i])) {
        ASSERT_EQ(bits_of(want[i]), bits_of(static_cast<Out>(src[i])));
      } else {
        ASSERT_TRUE(std::isnan(want[i]));
      }
    }
    for (const Isa isa : supported_isas()) {
      GuardedArray<Out> got(kChunk);
      cast(got, src, isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " seed " << seed;
    }
  }
}

TEST(Cast, FloatToDoubleIsTheSameOnRandomPatterns) {
  expect_same_casts<float, double>(kSeed + 1);
}
TEST(Cast, DoubleToFloatIsTheSameOnRandomPatterns) {
  expect_same_casts<double, float>(kSeed + 2);
}

TEST(Cast, EveryTailLengthAndMisalignment) {
  for (const Isa isa : supported_isas()) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      GuardedArray<float> src(n, n % 7);
      fill_moderate(src, 8.0, kSeed);
      GuardedArray<double> wide(n, n % 3);
      GuardedArray<float> back(n, n % 5);
      GuardedArray<BFloat16> narrow(n, n % 11);
      cast(wide, src, isa);
      cast(back, wide, isa);
      cast(narrow, src, isa);
      ASSERT_TRUE(wide.guards_intact() && narrow.guards_intact()) << name_of(isa) << " n " << n;
      ASSERT_TRUE(same_bits(src, back)) << name_of(isa) << " n " << n;
      for (std::int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(narrow[i], BFloat16(src[i]));
      }
    }
  }
}

TEST(Cast, CallersFloatingPointEnvironmentChangesNothing) {
  RandomPatterns random(kSeed);
  GuardedArray<double> src(5000);
  random.fill(src);
  for (const Isa isa : supported_isas()) {
    GuardedArray<float> want(src.size());
    GuardedArray<float> got(src.size());
    cast(want, src, isa);
    {
      const HostileEnvironment hostile;
      cast(got, src, isa);
    }
    EXPECT_TRUE(same_bits(want, got)) << name_of(isa);
  }
}

TEST(Cast, RefusesUnknownPairs) {
  double value = 0;
  EXPECT_THROW(cast_range(&value, DType::kBFloat16, &value, DType::kFloat64, 1, Isa::kScalar), Error);
  EXPECT_THROW(cast_range(&value, DType::kFloat32, &value, DType::kFloat32, 1, Isa::kScalar), Error);
  EXPECT_THROW(cast_range(&value, DType::kInt32, &value, DType::kFloat32, 1, Isa::kScalar), Error);
  EXPECT_THROW(cast_range(&value, DType::kFloat64, &value, DType::kFloat32, -1, Isa::kScalar), Error);
}

TEST(CopyStream, CopiesEverySizeAndAlignmentAndNothingElse) {
  std::mt19937_64 engine(kSeed);
  constexpr std::int64_t kLines = kCopyLinesBytes / 2;
  constexpr std::int64_t kElements = kCopyStreamBytes / 2;
  for (const Isa isa : supported_isas()) {
    for (std::int64_t n : {0L, 1L, 2L, 31L, 130L, kLines - 1, kLines, kLines + 1, 3 * kLines + 77, kElements - 1,
                           kElements, kElements + 1, kElements + 130}) {
      for (const std::int64_t misalign : {0, 1, 13, 31}) {
        GuardedArray<BFloat16> src(n, (misalign * 5) % 32);
        for (std::int64_t i = 0; i < n; ++i) {
          src[i].bits = static_cast<std::uint16_t>(engine());
        }
        GuardedArray<BFloat16> dst(n, misalign);
        copy_stream(dst.data(), src.data(), n * 2, isa);
        ASSERT_TRUE(same_bits(src, dst)) << name_of(isa) << " n " << n << " misalign " << misalign;
      }
    }
  }
  EXPECT_THROW(copy_stream(nullptr, nullptr, -1, Isa::kScalar), Error);
}

TEST(CopyStream, CopiesAnOddNumberOfBytesFromOddAddresses) {
  for (const std::int64_t bytes : {kCopyLinesBytes + 333, kCopyStreamBytes + 333}) {
    std::vector<unsigned char> src(static_cast<std::size_t>(bytes) + 8);
    for (std::size_t i = 0; i < src.size(); ++i) {
      src[i] = static_cast<unsigned char>(i * 31 + i / 251);
    }
    for (const Isa isa : supported_isas()) {
      std::vector<unsigned char> dst(src.size(), 0xee);
      copy_stream(dst.data() + 3, src.data() + 1, bytes, isa);
      EXPECT_EQ(std::memcmp(dst.data() + 3, src.data() + 1, static_cast<std::size_t>(bytes)), 0) << name_of(isa);
      EXPECT_EQ(dst[2], 0xee);
      EXPECT_EQ(dst[static_cast<std::size_t>(bytes) + 3], 0xee);
    }
  }
}

}  // namespace
}  // namespace zeroth::kernels
