#include "engine/straggler.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

namespace zeroth {
namespace {

using Times = std::vector<std::int64_t>;

/// Steps of 10 ms with the noise of a busy machine: a few per cent, and now and then twice the time.
class Machine {
 public:
  explicit Machine(int ranks, unsigned seed = 1) : ranks_(ranks), random_(seed) {}
  Times step(int slow = -1, double ratio = 1.0) {
    Times times;
    for (int rank = 0; rank < ranks_; ++rank) {
      double time = 10'000 * std::normal_distribution<double>(1.0, 0.04)(random_);
      if (random_() % 20 == 0) time *= 2;
      times.push_back(static_cast<std::int64_t>(rank == slow ? time * ratio : time));
    }
    return times;
  }

 private:
  int ranks_;
  std::mt19937 random_;
};

TEST(Straggler, ASlowRankIsNamedWithinTwentySteps) {
  for (unsigned seed = 0; seed < 3 * 4 * 25; ++seed) {
    const int ranks = std::array{2, 4, 64}[seed % 3];
    const double ratio = std::array{1.2, 1.3, 1.5, 4.0}[seed / 3 % 4];
    {
      Machine machine(ranks, seed);
      StragglerDetector detector;
      for (int step = 0; step < 100; ++step) ASSERT_FALSE(detector.observe(machine.step()));
      int named_after = 0;
      for (int step = 1; step <= 20 && named_after == 0; ++step) {
        if (const auto slow = detector.observe(machine.step(ranks - 1, ratio))) {
          EXPECT_EQ(slow->rank, ranks - 1);
          EXPECT_GE(slow->ratio, StragglerDetector::kRatio);
          named_after = step;
        }
      }
      EXPECT_GT(named_after, 0) << ranks << " ranks, " << ratio << ", seed " << seed;
    }
  }
}

TEST(Straggler, NoFalseAlarmInATenThousandCleanSteps) {
  for (const int ranks : {2, 3, 8}) {
    Machine machine(ranks, 7);
    StragglerDetector detector;
    for (int step = 0; step < 10'000; ++step) ASSERT_FALSE(detector.observe(machine.step())) << ranks << " " << step;
  }
}

TEST(Straggler, IsNamedOnceAndAgainAfterItKeptUp) {
  Machine machine(4);
  StragglerDetector detector;
  int named = 0;
  for (int step = 0; step < 200; ++step) named += detector.observe(machine.step(1, 1.6)) ? 1 : 0;
  EXPECT_EQ(named, 1);
  for (int step = 0; step < 100; ++step) named += detector.observe(machine.step()) ? 1 : 0;
  EXPECT_EQ(named, 1);
  for (int step = 0; step < 100; ++step) named += detector.observe(machine.step(1, 1.6)) ? 1 : 0;
  EXPECT_EQ(named, 2);
}

TEST(Straggler, StepsOfMicrosecondsAreNotCompared) {
  StragglerDetector detector;
  for (int step = 0; step < 100; ++step) EXPECT_FALSE(detector.observe(Times{100, 300}));
}

TEST(Straggler, OneRankHasNobodyToBeComparedWith) {
  StragglerDetector detector;
  for (int step = 0; step < 100; ++step) EXPECT_FALSE(detector.observe(Times{100'000}));
}

}  // namespace
}  // namespace zeroth
