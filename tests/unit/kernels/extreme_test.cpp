#include "kernel_test_support.h"

#include <kernels/reduce/extreme.h>
#include <zeroth/base/error.h>

#include <xmmintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
class ExtremeSources : public ::testing::Test {};
using Types = ::testing::Types<double, float, BFloat16, Float16, std::int64_t, std::int32_t, std::uint8_t>;
TYPED_TEST_SUITE(ExtremeSources, Types);

template <class T>
auto value_of(T element) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return static_cast<float>(element);
  } else {
    return element;
  }
}

/// What extreme.h promises for one element of all sources.
template <class T>
T expected(const std::vector<GuardedArray<T>>& sources, std::int64_t i, bool greatest) {
  T best = sources[0][i];
  for (const auto& source : sources) {
    const auto value = value_of(source[i]);
    if constexpr (std::is_floating_point_v<decltype(value_of(best))>) {
      if (std::isnan(value)) return static_cast<T>(std::numeric_limits<decltype(value_of(best))>::quiet_NaN());
    }
    if (greatest ? value > value_of(best) : value < value_of(best)) best = source[i];
  }
  return best;
}

TYPED_TEST(ExtremeSources, HaveTheBitsOfTheFirstBestOnRandomPatterns) {
  RandomPatterns random(kSeed + 17);
  for (const std::int64_t n : {0L, 1L, 33L, 2047L, 2048L, 2049L, 10'001L}) {
    for (const int num_sources : {1, 2, 3, 7}) {
      for (const bool greatest : {false, true}) {
        std::vector<GuardedArray<TypeParam>> sources;
        std::vector<const void*> pointers;
        sources.reserve(static_cast<std::size_t>(num_sources));
        for (int k = 0; k < num_sources; ++k) {
          sources.emplace_back(n, k % 5);
          random.fill(sources.back());
          // Many equal values, zeros of both signs among them.
          for (std::int64_t i = 0; i < n; i += 3) {
            sources.back()[i] =
                static_cast<TypeParam>(static_cast<float>((i + k) % 2 == 0 ? 0.0F : (i % 2 == 0 ? -0.0F : 1.0F)));
          }
          pointers.push_back(sources.back().data());
        }
        std::vector<TypeParam> want;
        for (std::int64_t i = 0; i < n; ++i) want.push_back(expected(sources, i, greatest));
        GuardedArray<TypeParam> dst(n, 1);
        ExtremeSourcesArgs args{.dst = dst.data(),
                                .sources = pointers.data(),
                                .num_sources = num_sources,
                                .dtype = DTypeOf<TypeParam>::value,
                                .greatest = greatest,
                                .n = n};
        extreme_sources(args);
        const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(TypeParam);
        ASSERT_TRUE(n == 0 || std::memcmp(dst.data(), want.data(), bytes) == 0) << n << " of " << num_sources;
        ASSERT_TRUE(dst.guards_intact());
        args.dst = sources.back().data();  // in place of the last one
        extreme_sources(args);
        ASSERT_TRUE(n == 0 || std::memcmp(sources.back().data(), want.data(), bytes) == 0)
            << n << " of " << num_sources;
      }
    }
  }
}

TEST(ExtremeSourcesEdges, DenormalsAreNotZeroWhateverTheCallersEnvironment) {
  const float small = std::numeric_limits<float>::denorm_min();
  const float zero = 0;
  const void* const sources[] = {&zero, &small};
  float dst = -1;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);  // flush to zero, denormals are zero
  extreme_sources(
      {.dst = &dst, .sources = sources, .num_sources = 2, .dtype = DType::kFloat32, .greatest = true, .n = 1});
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & ~0x3fU, (before | 0x8040U) & ~0x3fU);
  EXPECT_EQ(std::memcmp(&dst, &small, sizeof dst), 0);
}

TEST(ExtremeSourcesEdges, BadCallsAreRefused) {
  EXPECT_THROW(extreme_sources({.num_sources = 0, .n = 1}), Error);
  EXPECT_THROW(extreme_sources({.num_sources = 1, .n = -1}), Error);
}

}  // namespace
}  // namespace zeroth::kernels
