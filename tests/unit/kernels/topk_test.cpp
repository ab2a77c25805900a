#include "kernel_test_support.h"

#include <kernels/topk/topk.h>
#include <zeroth/base/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

constexpr std::array<std::int64_t, 8> kSizes{0, 1, 15, 17, 255, 257, 1000, 5003};

std::uint32_t magnitude_of(float x) {
  return bits_of(canonical_nan(x)) & 0x7fffffffU;
}

/// The places of the k greatest, ascending: by a sort.
std::vector<std::int32_t> greatest_of(const std::vector<float>& message, std::int64_t k) {
  std::vector<std::int32_t> places(message.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(), [&](std::int32_t a, std::int32_t b) {
    return magnitude_of(message[static_cast<std::size_t>(a)]) > magnitude_of(message[static_cast<std::size_t>(b)]);
  });
  places.resize(static_cast<std::size_t>(k));
  std::sort(places.begin(), places.end());
  return places;
}

enum class Numbers { kPatterns, kOrdinary, kFewValues, kAllEqual };

template <class T>
void fill(GuardedArray<T>& array, Numbers numbers, RandomPatterns& random) {
  random.fill(array);
  for (std::int64_t i = 0; numbers != Numbers::kPatterns && i < array.size(); ++i) {
    const auto any = random.template next<std::int32_t>();
    const float ordinary = static_cast<float>(any) * 0x1p-29F;
    const float few = static_cast<float>(any % 3) * (any < 0 ? -1.0F : 1.0F);
    array[i] = static_cast<T>(numbers == Numbers::kOrdinary ? ordinary : numbers == Numbers::kFewValues ? few : -2.5F);
  }
}

/// Of src [+ before], by a sort, with room for k elements and with that for a sample.
template <class T>
void require_greatest_of(const GuardedArray<T>& src, const GuardedArray<float>& before, std::int64_t k,
                         bool with_error) {
  const std::int64_t n = src.size();
  std::vector<float> message;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto given = static_cast<float>(src[i]);
    message.push_back(canonical_nan(with_error ? given + before[i] : given));
  }
  const std::vector<std::int32_t> want = greatest_of(message, k);
  for (const Isa isa : supported_isas()) {
    for (const std::int64_t room : {std::int64_t{0}, topk_room(n, k)}) {
      GuardedArray<std::int32_t> places(std::max(k, room));
      GuardedArray<float> values(std::max(k, room), 1);
      GuardedArray<float> error(n, 1);
      std::copy_n(before.data(), n, error.data());
      topk({.places = places.data(),
            .values = values.data(),
            .src = src.data(),
            .src_dtype = std::is_same_v<T, BFloat16>  ? DType::kBFloat16
                         : std::is_same_v<T, Float16> ? DType::kFloat16
                                                      : DType::kFloat32,
            .error = with_error ? error.data() : nullptr,
            .n = n,
            .k = k,
            .room = room},
           isa);
      ASSERT_TRUE(places.guards_intact() && values.guards_intact() && error.guards_intact());
      std::vector<float> left = message;
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int32_t place = want[static_cast<std::size_t>(j)];
        ASSERT_EQ(places[j], place) << name_of(isa) << " n " << n << " k " << k;
        ASSERT_EQ(bits_of(values[j]), bits_of(message[static_cast<std::size_t>(place)])) << "place " << place;
        left[static_cast<std::size_t>(place)] = 0.0F;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(bits_of(error[i]), bits_of(with_error ? left[static_cast<std::size_t>(i)] : before[i]))
            << "element " << i;
      }
    }
  }
}

template <class T>
void require_greatest(std::int64_t n, std::int64_t k, Numbers numbers, bool with_error, RandomPatterns& random) {
  GuardedArray<T> src(n, 1);
  GuardedArray<float> before(n);
  fill(src, numbers, random);
  fill(before, numbers, random);
  require_greatest_of(src, before, k, with_error);
}

TEST(Topk, OfASampleIsThatOfAllDigits) {
  constexpr std::int64_t kElements = 10011;
  RandomPatterns random(kSeed + 4);
  for (const std::int64_t k : {std::int64_t{1}, std::int64_t{200}, kElements / 9}) {
    for (const bool with_error : {false, true}) {
      // Equal numbers are more than there is room for.
      for (const Numbers numbers : {Numbers::kPatterns, Numbers::kOrdinary, Numbers::kFewValues, Numbers::kAllEqual}) {
        ASSERT_NO_FATAL_FAILURE(require_greatest<float>(kElements, k, numbers, with_error, random)) << "k " << k;
        ASSERT_NO_FATAL_FAILURE(require_greatest<BFloat16>(kElements, k, numbers, with_error, random));
      }
      // Nothing but the sample is great, then nothing of the sample.
      constexpr std::int64_t kLines = kElements / 8 / 16;
      for (const float sampled : {100.0F, 0.001F}) {
        GuardedArray<float> src(kElements, 1);
        fill(src, Numbers::kOrdinary, random);
        for (std::int64_t line = 0; line < kLines; ++line) {
          for (std::int64_t i = 0; i < 16; ++i) src[line * (kElements / kLines) + i] *= sampled;
        }
        GuardedArray<float> before(kElements);
        ASSERT_NO_FATAL_FAILURE(require_greatest_of(src, before, k, with_error)) << "k " << k;
      }
    }
  }
}

TEST(Topk, TakesWhatASortTakesAndLeavesTheRest) {
  RandomPatterns random(kSeed);
  for (const std::int64_t n : kSizes) {
    for (const std::int64_t k : {std::int64_t{0}, n / 100, n / 3, n - 1, n}) {
      if (k < 0) continue;
      for (const Numbers numbers : {Numbers::kPatterns, Numbers::kOrdinary, Numbers::kFewValues, Numbers::kAllEqual}) {
        for (const bool with_error : {false, true}) {
          ASSERT_NO_FATAL_FAILURE(require_greatest<float>(n, k, numbers, with_error, random))
              << "n " << n << " k " << k;
          ASSERT_NO_FATAL_FAILURE(require_greatest<BFloat16>(n, k, numbers, with_error, random));
          ASSERT_NO_FATAL_FAILURE(require_greatest<Float16>(n, k, numbers, with_error, random));
        }
      }
    }
  }
}

TEST(Topk, OfPartsIsThatOfTheWhole) {
  constexpr std::int64_t kElements = 3001;
  RandomPatterns random(kSeed + 1);
  for (const Numbers numbers : {Numbers::kOrdinary, Numbers::kFewValues}) {
    GuardedArray<float> src(kElements);
    fill(src, numbers, random);
    for (const std::int64_t k : {1, 100, 2000}) {
      std::vector<std::int32_t> places(static_cast<std::size_t>(k));
      std::vector<float> values(static_cast<std::size_t>(k));
      const Isa isa = best_isa();
      topk({.places = places.data(), .values = values.data(), .src = src.data(), .n = kElements, .k = k}, isa);
      const std::array<std::int64_t, 5> bounds{0, 7, 1000, 1000, kElements};
      std::array<std::array<std::int64_t, kTopkBins>, 4> counts{};
      TopkCut cut = topk_start(k);
      while (cut.level < kTopkLevels) {
        std::array<std::int64_t, kTopkBins> all{};
        for (std::size_t part = 0; part < 4; ++part) {
          counts[part] = {};
          topk_count({.src = src.data() + bounds[part],
                      .n = bounds[part + 1] - bounds[part],
                      .cut = cut,
                      .counts = counts[part].data()},
                     isa);
          for (std::size_t bin = 0; bin < all.size(); ++bin) all[bin] += counts[part][bin];
        }
        cut = topk_next(cut, all);
      }
      std::vector<std::int32_t> got(static_cast<std::size_t>(k));
      std::vector<float> beside(static_cast<std::size_t>(k));
      std::int64_t taken = 0;
      for (std::size_t part = 0; part < 4; ++part) {
        const std::int64_t ties = counts[part][cut.prefix & 1023U];
        TopkCut own = cut;
        own.left = std::min(cut.left, ties);
        cut.left -= own.left;
        taken += topk_take({.message = src.data() + bounds[part],
                            .n = bounds[part + 1] - bounds[part],
                            .first = static_cast<std::int32_t>(bounds[part]),
                            .cut = own,
                            .places = got.data() + taken,
                            .values = beside.data() + taken,
                            .capacity = k - taken},
                           isa);
      }
      EXPECT_EQ(taken, k);
      EXPECT_EQ(got, places);
      EXPECT_EQ(beside, values);
    }
  }
}

TEST(Topk, WithFeedbackSendsEverythingInTime) {
  constexpr std::int64_t kElements = 400;
  constexpr int kSteps = 400;
  GuardedArray<float> grad(kElements);
  fill_moderate(grad, 1.0, kSeed + 2);
  for (const bool with_error : {true, false}) {
    GuardedArray<float> error(kElements);
    GuardedArray<float> sum(kElements);
    std::vector<std::int32_t> places(20);
    std::vector<float> values(20);
    for (int step = 0; step < kSteps; ++step) {
      topk({.places = places.data(),
            .values = values.data(),
            .src = grad.data(),
            .error = with_error ? error.data() : nullptr,
            .n = kElements,
            .k = 20},
           best_isa());
      const TopkSource source{places.data(), values.data(), 20};
      topk_add({.dst = sum.data(), .sources = &source, .num_sources = 1, .n = kElements});
    }
    double difference = 0.0;
    double all = 0.0;
    for (std::int64_t i = 0; i < kElements; ++i) {
      difference += std::pow(sum[i] / kSteps - static_cast<double>(grad[i]), 2);
      all += std::pow(static_cast<double>(grad[i]), 2);
    }
    const double relative = std::sqrt(difference / all);
    EXPECT_EQ(relative < 0.05, with_error) << relative;
    EXPECT_EQ(relative > 0.5, !with_error) << relative;
  }
}

TEST(Topk, SumsSourcesInTheirOrder) {
  constexpr std::int64_t kElements = 100;
  RandomPatterns random(kSeed + 3);
  GuardedArray<float> dst(kElements, 1);
  fill(dst, Numbers::kOrdinary, random);
  GuardedArray<float> want(kElements);
  std::copy_n(dst.data(), kElements, want.data());
  const std::array<std::vector<std::int32_t>, 3> places{{{0, 3, 99}, {}, {3, 50, 99}}};
  const std::array<std::vector<float>, 3> values{{{0x1p25F, -1.0F, 0.3F}, {}, {1.0F, INFINITY, -0x1p30F}}};
  std::vector<TopkSource> sources;
  for (std::size_t s = 0; s < 3; ++s) {
    sources.push_back({places[s].data(), values[s].data(), static_cast<std::int64_t>(places[s].size())});
    for (std::size_t j = 0; j < places[s].size(); ++j) {
      const float product = values[s][j] * 0.25F;
      want[places[s][j]] = want[places[s][j]] + product;
    }
  }
  topk_add({.dst = dst.data(), .sources = sources.data(), .num_sources = 3, .n = kElements, .factor = 0.25F});
  EXPECT_TRUE(same_bits(want, dst));
  // A place that is none changes nothing.
  const std::int32_t outside = kElements;
  const float value = 1.0F;
  sources.push_back({&outside, &value, 1});
  EXPECT_EQ(
      code_of([&] { topk_add({.dst = dst.data(), .sources = sources.data(), .num_sources = 4, .n = kElements}); }),
      ErrorCode::kUsage);
  EXPECT_TRUE(same_bits(want, dst));
}

TEST(Topk, ThatCannotBeIsRefused) {
  const Isa isa = best_isa();
  float one = 1.0F;
  EXPECT_EQ(code_of([&] { topk({.n = -1}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk({.n = std::int64_t{1} << 31}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk({.src_dtype = DType::kFloat64}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk({.n = 1, .k = 2}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { static_cast<void>(topk_start(-1)); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk_count({.cut = topk_start(0)}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk_count({.error = &one, .cut = {.level = 1}}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk_take({.cut = topk_start(1)}, isa); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { topk_take({.error = &one, .cut = topk_start(0)}, isa); }), ErrorCode::kUsage);
  const std::vector<std::int64_t> none(kTopkBins, 0);
  EXPECT_EQ(code_of([&] { static_cast<void>(topk_next(topk_start(1), none)); }), ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
