#include "kernel_test_support.h"

#include <kernels/reduce/reduce.h>
#include <zeroth/base/error.h>

#include <cmath>
#include <tuple>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

template <class T>
class SumSources : public ::testing::Test {};
TYPED_TEST_SUITE(SumSources, SumPairs);

/// The type in which an element is summed; unsigned for integers, whose overflow wraps.
template <class T>
auto term(T value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>) {
    return static_cast<float>(value);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<std::make_unsigned_t<T>>(value);
  } else {
    return value;
  }
}

template <class Out, class Sum>
Out result(Sum sum) {
  if constexpr (std::is_floating_point_v<Sum>) {
    sum = std::isnan(sum) ? std::numeric_limits<Sum>::quiet_NaN() : sum;
  }
  return static_cast<Out>(sum);
}

template <class In, class Out>
struct Problem {
  std::vector<GuardedArray<In>> sources;
  std::vector<const void*> pointers;
  GuardedArray<Out> dst;

  Problem(std::int64_t n, int num_sources, std::int64_t misalign = 0) : dst(n, misalign) {
    for (int k = 0; k < num_sources; ++k) {
      sources.emplace_back(n, (misalign + k) % 5);
    }
    for (const auto& source : sources) {
      pointers.push_back(source.data());
    }
  }

  void fill_random(RandomPatterns& random) {
    for (auto& source : sources) {
      random.fill(source);
    }
    random.fill(dst);
  }

  SumSourcesArgs args(void* out, bool accumulate) const {
    return {.dst = out,
            .dst_dtype = DTypeOf<Out>::value,
            .accumulate = accumulate,
            .sources = pointers.data(),
            .num_sources = static_cast<int>(pointers.size()),
            .src_dtype = DTypeOf<In>::value,
            .n = dst.size()};
  }

  /// What reduce.h promises, element by element.
  GuardedArray<Out> expected(bool accumulate, const std::vector<int>& groups = {}) const {
    GuardedArray<Out> want(dst.size());
    for (std::int64_t i = 0; i < dst.size(); ++i) {
      const auto sum_of = [&](std::size_t first, std::size_t end) {
        auto partial = term(sources[first][i]);
        for (std::size_t k = first + 1; k < end; ++k) partial = partial + term(sources[k][i]);
        return partial;
      };
      auto end = groups.empty() ? sources.size() : static_cast<std::size_t>(groups.front());
      auto sum = sum_of(0, end);
      for (std::size_t group = 1; group < groups.size(); ++group) {
        const std::size_t first = end;
        end += static_cast<std::size_t>(groups[group]);
        sum = sum + sum_of(first, end);
      }
      if (accumulate) {
        sum = term(dst[i]) + sum;
      }
      want[i] = result<Out>(sum);
    }
    return want;
  }
};

TEST(SumSourcesMixed, GivesTheBitsOfWidenedSourcesOnRandomPatterns) {
  RandomPatterns random(kSeed + 3);
  for (const std::int64_t n : {0L, 1L, 15L, 4095L, 4096L, 4097L, 70'001L, 140'009L}) {
    for (const int num_sources : {2, 3, 5, 9}) {
      for (const bool accumulate : {false, true}) {
        for (const int narrow : {0, 1, num_sources}) {  // all of them, all but the first, none
          Problem<float, float> whole(n, num_sources);
          whole.fill_random(random);
          std::vector<GuardedArray<BFloat16>> halves;
          std::vector<const void*> pointers;
          std::vector<DType> dtypes;
          halves.reserve(whole.sources.size());
          for (int source = 0; source < num_sources; ++source) {
            GuardedArray<float>& values = whole.sources[static_cast<std::size_t>(source)];
            const bool is_narrow = source % 2 == 1 ? narrow < num_sources : narrow == 0;
            halves.emplace_back(n, 1);
            for (std::int64_t i = 0; is_narrow && i < n; ++i) {
              halves.back()[i] = BFloat16(values[i]);
              values[i] = static_cast<float>(halves.back()[i]);
            }
            pointers.push_back(is_narrow ? static_cast<const void*>(halves.back().data()) : values.data());
            dtypes.push_back(is_narrow ? DType::kBFloat16 : DType::kFloat32);
          }
          const GuardedArray<float> want = whole.expected(accumulate);
          for (const Isa isa : supported_isas()) {
            GuardedArray<float> got = whole.dst;
            SumSourcesArgs args = whole.args(got.data(), accumulate);
            args.sources = pointers.data();
            args.src_dtypes = dtypes.data();
            sum_sources(args, isa);
            ASSERT_TRUE(same_bits(want, got))
                << name_of(isa) << " n " << n << " sources " << num_sources << " narrow " << narrow;
          }
        }
      }
    }
  }
  float value = 0;
  const void* const source[] = {&value, &value};
  const DType dtypes[] = {DType::kFloat32, DType::kInt32};
  SumSourcesArgs wrong{.dst = &value, .sources = source, .num_sources = 2, .src_dtypes = dtypes, .n = 1};
  EXPECT_THROW(sum_sources(wrong, Isa::kScalar), Error);
}

TYPED_TEST(SumSources, AddsInSourceOrderWithTheSameBitsOnRandomPatterns) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  constexpr std::int64_t kN = 140'009;  // streams in all types but the narrow ones
  RandomPatterns random(kSeed);
  std::int64_t done = 0;
  for (int round = 0; done < 10'000'000; ++round) {
    const int num_sources = std::array{1, 2, 3, 4, 5, 8, 9, 16}[static_cast<std::size_t>(round % 8)];
    const bool accumulate = round / 8 % 2 == 1;
    Problem<In, Out> problem(kN, num_sources);
    problem.fill_random(random);
    const GuardedArray<Out> want = problem.expected(accumulate);
    for (const Isa isa : supported_isas()) {
      for (const bool read_soon : {false, true}) {
        GuardedArray<Out> got = problem.dst;
        SumSourcesArgs args = problem.args(got.data(), accumulate);
        args.read_soon = read_soon;
        sum_sources(args, isa);
        ASSERT_TRUE(same_bits(want, got))
            << name_of(isa) << " sources " << num_sources << " accumulate " << accumulate << " seed " << kSeed;
      }
    }
    done += kN * num_sources;
  }
}

TYPED_TEST(SumSources, GroupsAreSummedFirstWithTheSameBitsOnRandomPatterns) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  RandomPatterns random(kSeed + 7);
  for (const std::vector<int>& groups :
       {std::vector<int>{2, 2}, {1, 1, 1, 1}, {4}, {3, 1}, {1, 3}, {2, 1, 5, 4}, {8, 8}}) {
    int num_sources = 0;
    for (const int size : groups) num_sources += size;
    for (const std::int64_t n : {0L, 1L, 17L, 4095L, 4096L, 4097L, 12'289L, 140'009L}) {
      Problem<In, Out> problem(n, num_sources, 1);
      problem.fill_random(random);
      for (const bool accumulate : {false, true}) {
        const GuardedArray<Out> want = problem.expected(accumulate, groups);
        for (const Isa isa : supported_isas()) {
          GuardedArray<Out> got(n, 1);
          std::copy_n(problem.dst.data(), n, got.data());
          SumSourcesArgs args = problem.args(got.data(), accumulate);
          args.groups = groups.data();
          args.num_groups = static_cast<int>(groups.size());
          sum_sources(args, isa);
          ASSERT_TRUE(same_bits(want, got))
              << name_of(isa) << " n " << n << " groups " << ::testing::PrintToString(groups);
        }
      }
    }
  }
}

TEST(SumSourcesGroups, OfMixedSourcesGiveTheBitsOfWidenedOnes) {
  RandomPatterns random(kSeed + 8);
  constexpr std::int64_t kN = 9'001;
  Problem<float, float> problem(kN, 5);
  problem.fill_random(random);
  const std::vector<int> groups{2, 3};
  std::vector<GuardedArray<BFloat16>> halves(5, GuardedArray<BFloat16>(kN));
  std::vector<const void*> pointers = problem.pointers;
  std::vector<DType> dtypes(5, DType::kFloat32);
  for (const std::size_t narrow : {0U, 1U, 3U}) {
    for (std::int64_t i = 0; i < kN; ++i) {
      halves[narrow][i] = BFloat16(problem.sources[narrow][i]);
      problem.sources[narrow][i] = static_cast<float>(halves[narrow][i]);
    }
    pointers[narrow] = halves[narrow].data();
    dtypes[narrow] = DType::kBFloat16;
  }
  const GuardedArray<float> want = problem.expected(true, groups);
  for (const Isa isa : supported_isas()) {
    GuardedArray<float> got = problem.dst;
    SumSourcesArgs args = problem.args(got.data(), true);
    args.sources = pointers.data();
    args.src_dtypes = dtypes.data();
    args.groups = groups.data();
    args.num_groups = 2;
    sum_sources(args, isa);
    EXPECT_TRUE(same_bits(want, got)) << name_of(isa);
  }
}

TEST(SumSourcesGroups, TakePartInTheBits) {
  const float values[] = {1e8F, 4.0F, -1e8F, 4.0F};
  const void* const sources[] = {&values[0], &values[1], &values[2], &values[3]};
  float flat = 0;
  float grouped = 0;
  const int groups[] = {2, 2};
  sum_sources({.dst = &flat, .sources = sources, .num_sources = 4, .n = 1}, Isa::kScalar);
  sum_sources({.dst = &grouped, .sources = sources, .num_sources = 4, .groups = groups, .num_groups = 2, .n = 1},
              Isa::kScalar);
  EXPECT_EQ(flat, 4.0F);
  EXPECT_EQ(grouped, 0.0F);
}

TYPED_TEST(SumSources, EveryTailLengthMisalignmentAndSourceCount) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  RandomPatterns random(kSeed);
  for (const std::int64_t misalign : {0, 1, 3}) {
    for (std::int64_t n = 0; n <= 130; ++n) {
      for (const int num_sources : {1, 2, 3, 4, 5, 7, 64}) {
        Problem<In, Out> problem(n, num_sources, misalign);
        problem.fill_random(random);
        for (const bool accumulate : {false, true}) {
          const GuardedArray<Out> want = problem.expected(accumulate);
          for (const Isa isa : supported_isas()) {
            GuardedArray<Out> got(n, misalign);
            std::copy_n(problem.dst.data(), n, got.data());
            sum_sources(problem.args(got.data(), accumulate), isa);
            ASSERT_TRUE(same_bits(want, got)) << name_of(isa) << " n " << n << " sources " << num_sources;
          }
        }
      }
    }
  }
}

TYPED_TEST(SumSources, SplittingTheRangeChangesNothing) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  constexpr std::int64_t kN = 9001;
  RandomPatterns random(kSeed);
  Problem<In, Out> problem(kN, 6);
  problem.fill_random(random);
  const GuardedArray<Out> want = problem.expected(true);
  for (const Isa isa : supported_isas()) {
    GuardedArray<Out> got = problem.dst;
    for (std::int64_t at = 0, length = 0; at < kN; at += length) {
      length = std::min(2 * length + 1, kN - at);
      std::vector<const void*> pointers;
      for (const auto& source : problem.sources) {
        pointers.push_back(source.data() + at);
      }
      SumSourcesArgs args = problem.args(got.data() + at, true);
      args.sources = pointers.data();
      args.n = length;
      sum_sources(args, isa);
    }
    EXPECT_TRUE(same_bits(want, got)) << name_of(isa);
  }
}

TYPED_TEST(SumSources, DestinationMayBeOneOfTheSources) {
  using In = typename TypeParam::Source;
  using Out = typename TypeParam::Result;
  if constexpr (std::is_same_v<In, Out>) {
    for (const Isa isa : supported_isas()) {
      for (std::size_t k = 0; k < 7; ++k) {
        RandomPatterns random(kSeed);
        Problem<In, Out> problem(150'001, 7);
        problem.fill_random(random);
        const GuardedArray<Out> want = problem.expected(false);
        sum_sources(problem.args(problem.sources[k].data(), false), isa);
        EXPECT_TRUE(same_bits(want, problem.sources[k])) << name_of(isa) << " source " << k;
      }
    }
  }
}

// n - 1 additions of numbers of one sign: each rounds by at most half a unit, relative to a sum that only
// grows.
TEST(SumSourcesError, StaysWithinItsBoundAgainstLongDouble) {
  constexpr int kSources = 64;
  Problem<float, float> problem(1009, kSources);
  for (std::size_t k = 0; k < kSources; ++k) {
    fill_moderate(problem.sources[k], 1.0, kSeed + k);
    for (std::int64_t i = 0; i < 1009; ++i) {
      problem.sources[k][i] = std::abs(problem.sources[k][i]);
    }
  }
  sum_sources(problem.args(problem.dst.data(), false), best_isa());
  for (std::int64_t i = 0; i < 1009; ++i) {
    long double want = 0;
    for (const auto& source : problem.sources) {
      want += static_cast<long double>(source[i]);
    }
    ASSERT_LE(ulp_error(problem.dst[i], want), kSources - 1);
  }
}

TEST(SumSourcesEnvironment, CallersFloatingPointEnvironmentChangesNothing) {
  for (const Isa isa : supported_isas()) {
    RandomPatterns random(kSeed);
    Problem<float, float> problem(4099, 5);
    problem.fill_random(random);
    const GuardedArray<float> want = problem.expected(true);
    {
      const HostileEnvironment hostile;
      sum_sources(problem.args(problem.dst.data(), true), isa);
    }
    EXPECT_TRUE(same_bits(want, problem.dst)) << name_of(isa);
  }
}

TEST(SumSourcesErrors, RefusesWhatItCannotDo) {
  Problem<float, float> problem(8, 2);
  const auto refused = [&](auto change) {
    SumSourcesArgs args = problem.args(problem.dst.data(), false);
    change(args);
    EXPECT_THROW(sum_sources(args, Isa::kScalar), Error);
  };
  refused([](SumSourcesArgs& args) { args.n = -1; });
  refused([](SumSourcesArgs& args) { args.num_sources = 0; });
  refused([](SumSourcesArgs& args) { args.dst_dtype = DType::kFloat64; });
  refused([](SumSourcesArgs& args) { args.src_dtype = DType::kUInt8; });
  for (const std::vector<int>& groups : {std::vector<int>{1}, {2, 1}, {1, 0, 1}, {-1, 3}, {}}) {
    refused([&groups](SumSourcesArgs& args) {
      args.groups = groups.data() == nullptr ? &args.num_groups : groups.data();
      args.num_groups = static_cast<int>(groups.size());
    });
  }
}

}  // namespace
}  // namespace zeroth::kernels
