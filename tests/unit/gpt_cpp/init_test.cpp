#include "random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <vector>

namespace gpt {
namespace {

TEST(RandomKey, DependsOnEveryNumberAndTheirOrder) {
  const std::set<std::uint64_t> keys = {key_of(1),    key_of(1, 0),    key_of(1, 2),
                                        key_of(2, 1), key_of(1, 2, 0), key_of(0, 1, 2)};
  EXPECT_EQ(keys.size(), 6U);
}

TEST(RandomKey, IsNotLinearInItsNumbers) {
  // A sum of the numbers would let (step 1, rank 2) and (step 2, rank 1) draw the same text.
  std::set<std::uint64_t> keys;
  for (int step = 0; step < 50; ++step) {
    for (int rank = 0; rank < 50; ++rank) {
      keys.insert(key_of(9, step, rank));
    }
  }
  EXPECT_EQ(keys.size(), 2500U);
}

TEST(UnitInterval, StaysBelowOne) {
  EXPECT_EQ(unit_interval(0), 0.0);
  EXPECT_LT(unit_interval(~std::uint64_t{0}), 1.0);
}

TEST(ScaledUniform, HasTheAskedMomentsAndRange) {
  std::vector<float> values(1'000'001);  // odd
  fill_scaled_uniform(std::span(values), key_of(1), 0.02);
  double sum = 0.0;
  double squares = 0.0;
  for (const float value : values) {
    sum += value;
    squares += double{value} * double{value};
  }
  const auto count = static_cast<double>(values.size());
  EXPECT_NEAR(sum / count, 0.0, 5 * 0.02 / std::sqrt(count));
  EXPECT_NEAR(std::sqrt(squares / count), 0.02, 1e-4);
  const double bound = 0.02 * std::sqrt(3.0) * (1 + 1e-6);
  EXPECT_LE(*std::max_element(values.begin(), values.end()), bound);
  EXPECT_GE(*std::min_element(values.begin(), values.end()), -bound);
  EXPECT_NE(values[values.size() - 1], 0.0F);
}

TEST(ScaledUniform, IsTheSameInBothWidthsAndForAnyLength) {
  std::vector<float> floats(37);
  std::vector<double> doubles(36);
  fill_scaled_uniform(std::span(floats), 5, 1.0);
  fill_scaled_uniform(std::span(doubles), 5, 1.0);
  for (std::size_t i = 0; i < doubles.size(); ++i) {
    EXPECT_EQ(double{floats[i]}, doubles[i]) << i;
  }
  std::vector<float> other(37);
  fill_scaled_uniform(std::span(other), 6, 1.0);
  EXPECT_NE(floats, other);
  fill_scaled_uniform(std::span<float>(), 6, 1.0);
}

}  // namespace
}  // namespace gpt
