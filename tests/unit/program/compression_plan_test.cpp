// Levels of compression by dynamic programming, against all choices that there are.
#include <zeroth/base/error.h>
#include <zeroth/program/compression_plan.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

namespace zeroth {
namespace {

constexpr std::size_t kUnits = 5;
constexpr std::size_t kLevels = 4;

std::vector<CompressionUnit> drawn(std::mt19937_64& random, bool whole) {
  std::vector<CompressionUnit> units(kUnits);
  for (std::size_t unit = 0; unit < kUnits; ++unit) {
    units[unit].name = "layer " + std::to_string(unit);
    // More error with fewer bytes, in most of the draws.
    auto bytes = static_cast<std::uint64_t>(random() % 1000 + 100);
    double error = 0.0;
    for (std::size_t level = 0; level < kLevels; ++level) {
      units[unit].levels.push_back({bytes, error});
      bytes = bytes * (random() % 100) / 100 + (random() % 20);
      error += whole ? static_cast<double>(random() % 30) : static_cast<double>(random() % 10'000) * 0.01234567;
    }
  }
  return units;
}

/// The fewest bytes of all choices whose error is at most `budget`.
std::uint64_t least_of_all(const std::vector<CompressionUnit>& units, double budget) {
  std::uint64_t best = std::numeric_limits<std::uint64_t>::max();
  std::vector<int> levels;
  const std::function<void()> extend = [&] {
    if (levels.size() == units.size()) {
      const CompressionPlan plan = compression_of(units, levels);
      if (plan.squared_error <= budget) best = std::min(best, plan.bytes);
      return;
    }
    const auto count = static_cast<int>(units[levels.size()].levels.size());
    for (int level = 0; level < count; ++level) {
      levels.push_back(level);
      extend();
      levels.pop_back();
    }
  };
  extend();
  return best;
}

TEST(CompressionPlan, OfErrorsThatAreWholePartsIsTheBestOfAll) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    const std::vector<CompressionUnit> units = drawn(random, true);
    const auto budget = static_cast<double>(random() % 200 + 1);
    const CompressionPlan plan = plan_compression(units, budget, static_cast<int>(budget));
    ASSERT_EQ(plan.bytes, least_of_all(units, budget)) << "round " << round;
    ASSERT_LE(plan.squared_error, budget);
    ASSERT_EQ(plan, compression_of(units, plan.levels));
  }
}

TEST(CompressionPlan, OfOtherErrorsGivesAwayAPartAUnitAtMost) {
  std::mt19937_64 random(12);
  constexpr int kParts = 1000;
  for (int round = 0; round < 200; ++round) {
    const std::vector<CompressionUnit> units = drawn(random, false);
    const double budget = static_cast<double>(random() % 30'000 + 1) * 0.0123;
    const CompressionPlan plan = plan_compression(units, budget, kParts);
    ASSERT_LE(plan.squared_error, budget) << "round " << round;
    ASSERT_GE(plan.bytes, least_of_all(units, budget));
    ASSERT_LE(plan.bytes, least_of_all(units, budget * (1.0 - (kUnits + 1.0) / kParts)));
  }
}

TEST(CompressionPlan, TakesNoMoreBytesThanAUniformLevelOfTheSameError) {
  std::mt19937_64 random(13);
  int fewer = 0;
  for (int round = 0; round < 100; ++round) {
    const std::vector<CompressionUnit> units = drawn(random, true);
    const double budget = uniform_error(units, 2);
    if (budget == 0.0) continue;
    const CompressionPlan plan = plan_compression(units, budget, static_cast<int>(budget));
    const CompressionPlan uniform = compression_of(units, {2, 2, 2, 2, 2});
    ASSERT_LE(plan.bytes, uniform.bytes);
    ASSERT_LE(plan.squared_error, budget);
    fewer += plan.bytes < uniform.bytes ? 1 : 0;
  }
  EXPECT_GT(fewer, 50);
}

TEST(CompressionPlan, WithoutABudgetSendsWhatHasNoError) {
  const std::vector<CompressionUnit> units{{"a", {{9, 0.5}, {10, 0.0}, {8, 1.0}}}, {"b", {{7, 0.0}, {7, 0.0}}}};
  EXPECT_EQ(plan_compression(units, 0.0), (CompressionPlan{{1, 0}, 17, 0.0}));
  EXPECT_EQ(plan_compression(units, 0.7), (CompressionPlan{{0, 0}, 16, 0.5}));
  EXPECT_EQ(plan_compression({}, 1.0), CompressionPlan{});
  // 0.1 + 0.2 is above 0.3 in doubles: it is not taken.
  const std::vector<CompressionUnit> tenths{{"a", {{2, 0.0}, {1, 0.1}}}, {"b", {{3, 0.0}, {1, 0.2}}}};
  const CompressionPlan plan = plan_compression(tenths, 0.3, 3);
  EXPECT_LE(plan.squared_error, 0.3);
  EXPECT_EQ(plan.bytes, 3U);
}

TEST(CompressionPlan, ThatCannotBeIsRefused) {
  const auto refuses = [](const std::vector<CompressionUnit>& units, double budget, int steps = 10) {
    try {
      static_cast<void>(plan_compression(units, budget, steps));
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUsage;
    }
    return false;
  };
  const std::vector<CompressionUnit> one{{"a", {{1, 2.0}}}};
  EXPECT_FALSE(refuses(one, 2.0));
  EXPECT_TRUE(refuses(one, 1.9));
  EXPECT_TRUE(refuses(one, -1.0));
  EXPECT_TRUE(refuses(one, std::numeric_limits<double>::infinity()));
  EXPECT_TRUE(refuses(one, 2.0, 0));
  EXPECT_TRUE(refuses({{"a", {}}}, 1.0));
  EXPECT_TRUE(refuses({{"a", {{1, std::nan("")}}}}, 1.0));
  EXPECT_THROW(static_cast<void>(compression_of(one, {1})), Error);
  EXPECT_THROW(static_cast<void>(compression_of(one, {})), Error);
}

}  // namespace
}  // namespace zeroth
