// Cuts of layers into chunks, against all cuts that there are.
#include <zeroth/base/error.h>
#include <zeroth/program/cut.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using ::testing::ElementsAre;

/// Largest sum of a chunk, and sum of the squares.
std::pair<double, double> measure(const std::vector<double>& costs, const std::vector<int>& bounds) {
  double largest = 0;
  double squares = 0;
  for (std::size_t chunk = 0; chunk + 1 < bounds.size(); ++chunk) {
    double sum = 0;
    for (int layer = bounds[chunk]; layer < bounds[chunk + 1]; ++layer) sum += costs[static_cast<std::size_t>(layer)];
    largest = std::max(largest, sum);
    squares += sum * sum;
  }
  return {largest, squares};
}

std::pair<double, double> best_of_all(const std::vector<double>& costs, int chunks) {
  std::pair<double, double> best{std::numeric_limits<double>::infinity(), 0};
  std::vector<int> bounds{0};
  const std::function<void()> extend = [&] {
    const int count = static_cast<int>(costs.size());
    if (static_cast<int>(bounds.size()) == chunks) {
      bounds.push_back(count);
      best = std::min(best, measure(costs, bounds));
      bounds.pop_back();
      return;
    }
    for (int next = bounds.back() + 1; next < count; ++next) {
      bounds.push_back(next);
      extend();
      bounds.pop_back();
    }
  };
  extend();
  return best;
}

TEST(CutLayers, IsAsGoodAsTheBestOfAllCuts) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    std::vector<double> costs(1 + random() % 10);
    for (double& cost : costs) cost = static_cast<double>(random() % (round % 2 == 0 ? 5 : 1000));
    const int chunks = 1 + static_cast<int>(random() % costs.size());
    const std::vector<int> bounds = cut_layers(costs, chunks);
    ASSERT_EQ(static_cast<int>(bounds.size()), chunks + 1) << "round " << round;
    ASSERT_EQ(bounds.front(), 0);
    ASSERT_EQ(bounds.back(), static_cast<int>(costs.size()));
    ASSERT_TRUE(std::ranges::adjacent_find(bounds, std::greater_equal()) == bounds.end())
        << "round " << round << ": a chunk is empty";
    ASSERT_EQ(measure(costs, bounds), best_of_all(costs, chunks)) << "round " << round;
  }
}

TEST(CutLayers, LastChunksBeginEarlyAmongEqualCuts) {
  EXPECT_THAT(cut_layers(std::vector<double>{1, 1, 1}, 2), ElementsAre(0, 1, 3));
  EXPECT_THAT(cut_layers(std::vector<double>{0, 0, 0, 0}, 3), ElementsAre(0, 1, 2, 4));
}

TEST(CutLayers, RefusesWhatCannotBeCut) {
  EXPECT_THROW(static_cast<void>(cut_layers(std::vector<double>{1, 2}, 3)), Error);
  EXPECT_THROW(static_cast<void>(cut_layers({}, 1)), Error);
  EXPECT_THROW(static_cast<void>(cut_layers(std::vector<double>{1, 2}, 0)), Error);
  EXPECT_THROW(static_cast<void>(cut_layers(std::vector<double>{1, -2}, 1)), Error);
  EXPECT_THROW(static_cast<void>(cut_layers(std::vector<double>{1, std::numeric_limits<double>::quiet_NaN()}, 1)),
               Error);
}

TEST(CutEvenly, TheFirstChunksHaveOneMore) {
  EXPECT_THAT(cut_evenly(5, 2), ElementsAre(0, 3, 5));
  EXPECT_THAT(cut_evenly(11, 4), ElementsAre(0, 3, 6, 9, 11));
  EXPECT_THAT(cut_evenly(6, 3), ElementsAre(0, 2, 4, 6));
  EXPECT_THAT(cut_evenly(3, 1), ElementsAre(0, 3));
}

TEST(CutEvenly, RefusesAChunkWithoutALayer) {
  EXPECT_THROW(static_cast<void>(cut_evenly(2, 3)), Error);
  EXPECT_THROW(static_cast<void>(cut_evenly(2, 0)), Error);
  EXPECT_THROW(static_cast<void>(cut_evenly(-1, 1)), Error);
}

}  // namespace
}  // namespace zeroth
