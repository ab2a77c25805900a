#include "kernel_test_support.h"

#include <kernels/bucket/bucket.h>
#include <zeroth/base/error.h>

#include <cmath>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class In, class Out>
struct Pair {
  using Source = In;
  using Bucket = Out;
};

template <class T>
class BucketOp : public ::testing::Test {};
using Pairs = ::testing::Types<Pair<float, float>, Pair<BFloat16, float>, Pair<Float16, float>, Pair<double, double>>;
TYPED_TEST_SUITE(BucketOp, Pairs);

template <class T>
std::int64_t count_nonfinite(const GuardedArray<T>& array) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < array.size(); ++i) {
    count += std::isfinite(to_double(array[i])) ? 0 : 1;
  }
  return count;
}

template <class Out, class In>
Out widened(In value) {
  if constexpr (sizeof(In) == sizeof(Out)) {
    return value;
  } else if constexpr (std::is_same_v<In, Float16>) {
    return std::bit_cast<float>(Float16::widen_bits(value.bits));
  } else {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16U);
  }
}

TYPED_TEST(BucketOp, StoreKeepsBitsAndCountsNonFiniteOnRandomPatterns) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Bucket;
  constexpr std::int64_t kChunk = 200'003;  // past the streaming threshold
  RandomPatterns random(kSeed);
  for (std::int64_t done = 0; done < 10'000'000; done += kChunk) {
    GuardedArray<In> src(kChunk, 1);
    random.fill(src);
    GuardedArray<Out> want(kChunk);
    for (std::int64_t i = 0; i < kChunk; ++i) {
      const auto bits = bits_of(widened<Out>(src[i]));  // through bits: assignment of a float could quieten a NaN
      std::memcpy(want.data() + i, &bits, sizeof(bits));
    }
    const std::int64_t nonfinite = count_nonfinite(src);
    for (const Isa isa : supported_isas()) {
      GuardedArray<Out> got(kChunk, done == 0 ? 5 : 0);
      ASSERT_EQ(bucket_store(got.data(), DTypeOf<Out>::value, src.data(), DTypeOf<In>::value, kChunk, isa), nonfinite)
          << name_of(isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " seed " << kSeed;
    }
  }
}

TYPED_TEST(BucketOp, AddRoundsOnceAndEveryInstructionSetGivesTheSameBitsOnRandomPatterns) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Bucket;
  constexpr std::int64_t kChunk = 65521;
  RandomPatterns random(kSeed + 1);
  for (std::int64_t done = 0; done < 10'000'000; done += kChunk) {
    GuardedArray<In> src(kChunk, 3);
    GuardedArray<Out> start(kChunk);
    random.fill(src);
    random.fill(start);
    GuardedArray<Out> want = start;
    for (std::int64_t i = 0; i < kChunk; ++i) {
      const Out sum = start[i] + widened<Out>(src[i]);
      want[i] = std::isnan(sum) ? std::numeric_limits<Out>::quiet_NaN() : sum;
    }
    const std::int64_t nonfinite = count_nonfinite(src);
    for (const Isa isa : supported_isas()) {
      GuardedArray<Out> got = start;
      ASSERT_EQ(bucket_add(got.data(), src.data(), DTypeOf<In>::value, kChunk, isa), nonfinite) << name_of(isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " seed " << kSeed + 1;
    }
  }
}

TYPED_TEST(BucketOp, EveryTailLengthAndMisalignment) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Bucket;
  for (const Isa isa : supported_isas()) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      for (const std::int64_t misalign : {0, 1, 7}) {
        GuardedArray<In> src(n, misalign);
        for (std::int64_t i = 0; i < n; ++i) {
          src[i] = static_cast<In>(static_cast<float>(i) + 0.5F);
        }
        GuardedArray<Out> dst(n, (misalign * 3) % 16);
        EXPECT_EQ(bucket_store(dst.data(), DTypeOf<Out>::value, src.data(), DTypeOf<In>::value, n, isa), 0);
        EXPECT_EQ(bucket_add(dst.data(), src.data(), DTypeOf<In>::value, n, isa), 0);
        ASSERT_TRUE(dst.guards_intact()) << name_of(isa) << " n " << n;
        for (std::int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(dst[i], 2 * widened<Out>(src[i])) << name_of(isa) << " n " << n << " element " << i;
        }
      }
    }
  }
}

TYPED_TEST(BucketOp, FindsOneNonFiniteElementWhereverItIs) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Bucket;
  constexpr std::int64_t kN = 100;
  for (const Isa isa : supported_isas()) {
    for (std::int64_t at = 0; at < kN; ++at) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        GuardedArray<In> src(kN);
        GuardedArray<Out> dst(kN);
        src[at] = static_cast<In>(bad);
        ASSERT_EQ(bucket_store(dst.data(), DTypeOf<Out>::value, src.data(), DTypeOf<In>::value, kN, isa), 1)
            << name_of(isa) << at;
        src[at] = In{};  // the sum is still not finite, the source is
        ASSERT_EQ(bucket_add(dst.data(), src.data(), DTypeOf<In>::value, kN, isa), 0) << name_of(isa) << at;
      }
    }
  }
}

TEST(BucketStore, KeepsBFloat16AsItIsAndCountsNonFiniteOnRandomPatterns) {
  constexpr std::int64_t kChunk = 300'007;  // past the streaming threshold
  const auto store = [](GuardedArray<BFloat16>& dst, const GuardedArray<BFloat16>& src, Isa isa) {
    return bucket_store(dst.data(), DType::kBFloat16, src.data(), DType::kBFloat16, src.size(), isa);
  };
  RandomPatterns random(kSeed + 2);
  for (std::int64_t done = 0; done < 10'000'000; done += kChunk) {
    GuardedArray<BFloat16> src(kChunk, 1);
    random.fill(src);
    GuardedArray<BFloat16> want = src;
    for (std::int64_t i = 0; i < kChunk; ++i) {
      if (std::isnan(static_cast<float>(src[i]))) want[i].bits |= 0x40U;  // quiet
    }
    for (const Isa isa : supported_isas()) {
      GuardedArray<BFloat16> got(kChunk, done == 0 ? 5 : 0);
      ASSERT_EQ(store(got, src, isa), count_nonfinite(src)) << name_of(isa);
      ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " seed " << kSeed + 2;
    }
  }
  for (const Isa isa : supported_isas()) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      for (const std::int64_t misalign : {0, 1, 7}) {
        GuardedArray<BFloat16> src(n, misalign);
        for (std::int64_t i = 0; i < n; ++i) src[i] = BFloat16(static_cast<float>(i) - 0.5F);
        GuardedArray<BFloat16> dst(n, (misalign * 3) % 16);
        ASSERT_EQ(store(dst, src, isa), 0);
        ASSERT_TRUE(dst.guards_intact() && same_bits(src, dst)) << name_of(isa) << " n " << n;
      }
    }
  }
}

TEST(FillZero, WritesTheRangeAndNothingElse) {
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t n : {0L, 1L, 17L, 1000L, 65535L, 65537L, 300'007L}) {
      for (const std::int64_t misalign : {0, 1, 5}) {
        GuardedArray<float> array(n, misalign);
        std::fill_n(array.data(), n, 1.0F);
        const GuardedArray<float> want(n);
        fill_zero(array.data(), n * 4, isa);
        ASSERT_TRUE(same_bits(want, array)) << name_of(isa) << " n " << n << " misalign " << misalign;
      }
    }
    GuardedArray<BFloat16> odd(300'001, 3);
    std::fill_n(odd.data(), odd.size(), BFloat16(1.0F));
    fill_zero(odd.data(), odd.size() * 2, isa);
    EXPECT_TRUE(same_bits(GuardedArray<BFloat16>(odd.size()), odd)) << name_of(isa);
  }
}

TEST(BucketErrors, RefusesWhatItCannotDo) {
  float value = 0;
  EXPECT_THROW((void)bucket_store(&value, DType::kInt32, &value, DType::kInt32, 1, Isa::kScalar), Error);
  EXPECT_THROW((void)bucket_store(&value, DType::kBFloat16, &value, DType::kFloat32, 1, Isa::kScalar), Error);
  EXPECT_THROW((void)bucket_add(&value, &value, DType::kFloat32, -1, Isa::kScalar), Error);
  EXPECT_THROW(fill_zero(&value, -1, Isa::kScalar), Error);
}

}  // namespace
}  // namespace zeroth::kernels
