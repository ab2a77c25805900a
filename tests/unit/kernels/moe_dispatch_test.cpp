// Dispatch against a plain one, that its places are a bijection, what it drops, and the noise on a router's input.
#include "kernel_test_support.h"

#include <kernels/common/uniform.h>
#include <kernels/moe/dispatch.h>

#include <array>
#include <map>
#include <numeric>
#include <tuple>

namespace zeroth::kernels {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace)

struct Batch {
  std::int64_t tokens = 0;
  std::int64_t k = 1;
  std::int64_t experts = 1;
  std::vector<std::int32_t> chosen;
  std::vector<float> weights;
};

/// Experts of low numbers are chosen more often; each entry in nine is not routed. Few different weights: ties.
Batch batch_of(std::int64_t tokens, std::int64_t k, std::int64_t experts, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  Batch batch{tokens, k, experts, {}, {}};
  for (std::int64_t i = 0; i < tokens * k; ++i) {
    const auto most = static_cast<std::uint64_t>(experts);
    const std::uint64_t expert = engine() % (1 + engine() % most);
    batch.chosen.push_back(engine() % 9 == 0 ? -1 : static_cast<std::int32_t>(expert));
    batch.weights.push_back(engine() % 31 == 0 ? std::nanf("") : static_cast<float>(engine() % 7) - 2.0F);
  }
  return batch;
}

struct Places {
  std::vector<std::int64_t> counts, offsets;
  std::vector<std::int32_t> slot_of, source_of;
  friend bool operator==(const Places&, const Places&) = default;
};

DispatchArgs args_of(const Batch& batch, std::int64_t capacity, DropPolicy policy, std::uint64_t seed, Places& places) {
  const auto entries = static_cast<std::size_t>(batch.tokens * batch.k);
  places.counts.assign(static_cast<std::size_t>(batch.experts), -7);
  places.offsets.assign(static_cast<std::size_t>(batch.experts + 1), -7);
  places.slot_of.assign(entries, -7);
  places.source_of.assign(entries, -7);
  return {.chosen = batch.chosen.data(),
          .tokens = batch.tokens,
          .k = batch.k,
          .experts = batch.experts,
          .capacity = capacity,
          .policy = policy,
          .weights = batch.weights.data(),
          .seed = seed,
          .counts = places.counts.data(),
          .offsets = places.offsets.data(),
          .slot_of = places.slot_of.data(),
          .source_of = places.source_of.data()};
}

/// Ranges of experts as threads would take them, in reverse order.
Places run_dispatch(const Batch& batch, std::int64_t capacity, DropPolicy policy, std::uint64_t seed = 3,
                    std::int64_t parts = 1) {
  Places places;
  DispatchArgs args = args_of(batch, capacity, policy, seed, places);
  GuardedArray<std::int64_t> workspace(
      static_cast<std::int64_t>(dispatch_workspace_bytes(args, batch.experts) / sizeof(std::int64_t)));
  args.workspace = workspace.data();
  if (parts == 1) {
    dispatch(args);
  } else {
    dispatch_check(args);
    for (std::int64_t p = parts; p-- > 0;)
      dispatch_keep(args, p * batch.experts / parts, (p + 1) * batch.experts / parts);
    dispatch_offsets(args);
    for (std::int64_t p = parts; p-- > 0;)
      dispatch_place(args, p * batch.experts / parts, (p + 1) * batch.experts / parts);
  }
  EXPECT_TRUE(workspace.guards_intact());
  return places;
}

std::uint64_t priority_like(std::uint64_t seed, std::uint64_t token, std::uint64_t j) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15ULL * (token * 64 + j + 1);
  x = (x ^ x >> 30U) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27U) * 0x94d049bb133111ebULL;
  return x ^ x >> 31U;
}

Places places_like(const Batch& batch, std::int64_t capacity, DropPolicy policy, std::uint64_t seed = 3) {
  const auto entries = static_cast<std::size_t>(batch.tokens * batch.k);
  Places want;
  want.slot_of.assign(entries, -1);
  want.source_of.assign(entries, -7);
  want.offsets.push_back(0);
  std::int32_t slot = 0;
  for (std::int64_t e = 0; e < batch.experts; ++e) {
    // (drop order, choice, token)
    std::vector<std::tuple<bool, double, std::uint64_t, std::int64_t, std::int64_t>> order;
    for (std::int64_t t = 0; t < batch.tokens; ++t) {
      for (std::int64_t j = 0; j < batch.k; ++j) {
        const auto entry = static_cast<std::size_t>(t * batch.k + j);
        if (batch.chosen[entry] != e) continue;
        const float w = batch.weights[entry];
        const bool by_score = policy == DropPolicy::kByScore;
        const std::uint64_t random = policy == DropPolicy::kRandom ? priority_like(seed, static_cast<std::uint64_t>(t),
                                                                                   static_cast<std::uint64_t>(j))
                                                                   : 0;
        order.emplace_back(by_score && std::isnan(w), by_score && !std::isnan(w) ? -static_cast<double>(w) : 0.0,
                           random, j, t);
      }
    }
    std::sort(order.begin(), order.end());
    if (capacity >= 0 && order.size() > static_cast<std::size_t>(capacity))
      order.resize(static_cast<std::size_t>(capacity));
    std::vector<std::int64_t> kept;
    for (const auto& one : order) kept.push_back(std::get<4>(one) * batch.k + std::get<3>(one));
    std::sort(kept.begin(), kept.end());
    for (const std::int64_t entry : kept) {
      want.slot_of[static_cast<std::size_t>(entry)] = slot;
      want.source_of[static_cast<std::size_t>(slot++)] = static_cast<std::int32_t>(entry);
    }
    want.counts.push_back(static_cast<std::int64_t>(kept.size()));
    want.offsets.push_back(slot);
  }
  return want;
}

TEST(MoeDispatch, PlacesLikeAPlainOneInAnyParts) {
  std::uint64_t seed = kSeed;
  for (const auto& [tokens, k, experts] : std::vector<std::array<std::int64_t, 3>>{
           {0, 1, 1}, {0, 2, 5}, {1, 1, 1}, {40, 1, 1}, {17, 3, 3}, {100, 2, 8}, {65, 8, 64}, {9, 4, 300}}) {
    const Batch batch = batch_of(tokens, k, experts, ++seed);
    for (const std::int64_t capacity : {kNoCapacity, std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, tokens * k}) {
      for (const DropPolicy policy : {DropPolicy::kByPosition, DropPolicy::kByScore, DropPolicy::kRandom}) {
        const Places want = places_like(batch, capacity, policy);
        for (const std::int64_t parts : {1, 2, 7}) {
          ASSERT_EQ(want, run_dispatch(batch, capacity, policy, 3, parts))
              << "tokens " << tokens << " k " << k << " experts " << experts << " capacity " << capacity << " policy "
              << static_cast<int>(policy) << " parts " << parts << " seed " << seed;
        }
      }
    }
  }
}

TEST(MoeDispatch, IsABijectionOfKeptEntries) {
  const Batch batch = batch_of(500, 4, 16, kSeed);
  for (const DropPolicy policy : {DropPolicy::kByPosition, DropPolicy::kByScore, DropPolicy::kRandom}) {
    const Places places = run_dispatch(batch, 40, policy);
    std::int64_t kept = 0;
    for (std::size_t entry = 0; entry < places.slot_of.size(); ++entry) {
      const std::int32_t slot = places.slot_of[entry];
      if (slot < 0) continue;
      ++kept;
      ASSERT_EQ(places.source_of[static_cast<std::size_t>(slot)], static_cast<std::int32_t>(entry));
      const auto e = static_cast<std::size_t>(batch.chosen[entry]);
      ASSERT_TRUE(slot >= places.offsets[e] && slot < places.offsets[e + 1]);
    }
    EXPECT_EQ(kept, places.offsets.back());
    EXPECT_EQ(std::accumulate(places.counts.begin(), places.counts.end(), std::int64_t{0}), kept);
    EXPECT_LT(kept, 4 * 500 - 300);  // some are dropped
  }
}

/// Chi-square of drops over 16 parts of the batch, of 1,024 entries that all go to one expert.
double unevenness(DropPolicy policy) {
  Batch batch = batch_of(1024, 1, 1, kSeed);
  std::fill(batch.chosen.begin(), batch.chosen.end(), 0);
  std::array<double, 16> dropped{};
  constexpr int kRounds = 50;
  for (int round = 0; round < kRounds; ++round) {
    const Places places = run_dispatch(batch, 512, policy, static_cast<std::uint64_t>(round));
    for (std::size_t t = 0; t < 1024; ++t) dropped[t / 64] += places.slot_of[t] < 0 ? 1.0 : 0.0;
  }
  double chi = 0.0;
  constexpr double kMean = 512.0 / 16 * kRounds;
  for (const double one : dropped) chi += (one - kMean) * (one - kMean) / kMean;
  return chi;
}

TEST(MoeDispatch, RandomDropsAreUniformOverPositions) {
  // 15 degrees of freedom; 37.7 is exceeded once in 1,000 draws that are uniform. Half of all are dropped, so the true
  // variance is half of that.
  EXPECT_LT(unevenness(DropPolicy::kRandom), 37.7);
  EXPECT_GT(unevenness(DropPolicy::kRandom), 1.0);  // nor too even
  EXPECT_GT(unevenness(DropPolicy::kByPosition), 1000.0);
}

TEST(MoeDispatch, ASeedDropsByTheNumberOfTheTokenInTheBatch) {
  Batch batch = batch_of(64, 2, 2, kSeed);
  Places all;
  DispatchArgs args = args_of(batch, 10, DropPolicy::kRandom, 5, all);
  std::vector<std::int64_t> workspace(dispatch_workspace_bytes(args, 2) / sizeof(std::int64_t));
  args.workspace = workspace.data();
  dispatch(args);
  const std::vector<std::int32_t> of_zero = all.slot_of;
  dispatch(args);
  EXPECT_EQ(all.slot_of, of_zero);
  args.first_token = 64;
  dispatch(args);
  EXPECT_NE(all.slot_of, of_zero);
  // Defined bit by bit: SplitMix64 of the seed 0 gives these first two numbers.
  EXPECT_EQ(priority_like(0, 0, 0), 0xe220a8397b1dcdafULL);
  EXPECT_EQ(priority_like(0, 0, 1), 0x6e789e6aa1b965f4ULL);
}

TEST(MoeDispatch, ThatCannotBeIsRefused) {
  const auto code = [](const DispatchArgs& args) { return code_of([&] { dispatch_check(args); }); };
  EXPECT_EQ(code({}), ErrorCode::kInternal);
  EXPECT_EQ(code({.tokens = -1}), ErrorCode::kUsage);
  EXPECT_EQ(code({.tokens = std::int64_t{1} << 30, .k = 2}), ErrorCode::kUsage);
  EXPECT_EQ(code({.k = 0}), ErrorCode::kUsage);
  EXPECT_EQ(code({.k = 65}), ErrorCode::kUsage);
  EXPECT_EQ(code({.experts = 0}), ErrorCode::kUsage);
  EXPECT_EQ(code({.capacity = -2}), ErrorCode::kUsage);
  const std::vector<std::int32_t> chosen{0, -3, 1, 4};
  EXPECT_EQ(
      code({.chosen = chosen.data(), .tokens = 2, .k = 2, .experts = 5, .capacity = 1, .policy = DropPolicy::kByScore}),
      ErrorCode::kUsage);
  EXPECT_EQ(code_of([&] { dispatch_keep({.experts = 5}, 2, 6); }), ErrorCode::kUsage);
  try {
    dispatch({.chosen = chosen.data(), .tokens = 2, .k = 2, .experts = 4});
    FAIL() << "took an expert that is none";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("token 1, expert 4"), std::string::npos) << error.what();
  }
}

template <class T>
void require_jitter(DType dtype) {
  constexpr std::int64_t kTokens = 5;
  constexpr std::int64_t kWidth = 77;
  GuardedArray<float> from(kTokens * kWidth);
  fill_moderate(from, 3.0, kSeed);
  GuardedArray<T> src(kTokens * kWidth, 1);
  GuardedArray<T> want(kTokens * kWidth);
  for (std::int64_t i = 0; i < src.size(); ++i) {
    src[i] = static_cast<T>(from[i]);
    const auto token = static_cast<std::uint64_t>(100 + i / kWidth);
    const float u =
        uniform_of(static_cast<std::uint32_t>(priority_like(9, token, 0)), static_cast<std::uint32_t>(i % kWidth));
    const float factor = std::fma(0.5F, u, 0.75F);
    EXPECT_TRUE(factor >= 0.75F && factor <= 1.25F);
    want[i] = static_cast<T>(static_cast<float>(src[i]) * factor);
  }
  for (const Isa isa : supported_isas()) {
    GuardedArray<T> dst(kTokens * kWidth, 1);
    for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{2, 2}, std::pair{2, 5}}) {
      jitter({.dst = dst.data() + begin * kWidth,
              .src = src.data() + begin * kWidth,
              .dtype = dtype,
              .tokens = end - begin,
              .width = kWidth,
              .epsilon = 0.25F,
              .seed = 9,
              .first_token = 100 + begin},
             isa);
    }
    EXPECT_TRUE(same_bits(want, dst)) << name_of(isa);
  }
}

TEST(MoeDispatch, JitterIsThatOfTokenAndColumn) {
  require_jitter<float>(DType::kFloat32);
  require_jitter<BFloat16>(DType::kBFloat16);
  require_jitter<Float16>(DType::kFloat16);
  EXPECT_EQ(code_of([] { jitter({.epsilon = 1.5F}, best_isa()); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([] { jitter({.dtype = DType::kFloat64}, best_isa()); }), ErrorCode::kUsage);
  EXPECT_EQ(code_of([] { jitter({.width = -1}, best_isa()); }), ErrorCode::kUsage);
}

}  // namespace
}  // namespace zeroth::kernels
