#include "engine/straggler.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

namespace zeroth {
namespace {

using Times = std::vector<StepTimes>;

/// Steps of 10 ms with the noise of a busy machine: a few per cent, and now and then twice the time.
class Machine {
 public:
  explicit Machine(int ranks, unsigned seed = 1) : ranks_(ranks), random_(seed) {}
  /// The slow rank's excess is in its backward.
  Times step(int slow = -1, double ratio = 1.0) {
    Times times;
    for (int rank = 0; rank < ranks_; ++rank) {
      double time = 10'000 * std::normal_distribution<double>(1.0, 0.04)(random_);
      if (random_() % 20 == 0) time *= 2;
      const auto whole = static_cast<std::int64_t>(time);
      const auto excess = static_cast<std::int64_t>(rank == slow ? time * (ratio - 1) : 0);
      times.push_back({.between_us = whole / 10,
                       .forward_us = whole * 3 / 10,
                       .backward_us = whole * 5 / 10 + excess,
                       .step_us = whole / 10,
                       .waited_us = 7});
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
          EXPECT_EQ(slow->phase, "in the backward");
          EXPECT_NEAR(static_cast<double>(slow->excess_us), 10'000 * (ratio - 1), 2'000 * ratio);
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
  for (int step = 0; step < 100; ++step)
    EXPECT_FALSE(detector.observe(Times{{.forward_us = 100}, {.forward_us = 300}}));
}

TEST(Straggler, WhoWaitsIsNotSlow) {
  StragglerDetector detector;
  for (int step = 0; step < 100; ++step) {
    EXPECT_FALSE(detector.observe(Times{{.forward_us = 10'000}, {.forward_us = 10'000, .waited_us = 50'000}}));
  }
}

TEST(Straggler, ThePhaseIsSaid) {
  const auto names = [](const StepTimes& slow) {
    StragglerDetector detector;
    std::string text;
    const StepTimes usual{.between_us = 1'000, .forward_us = 3'000, .backward_us = 6'000, .step_us = 500};
    for (int step = 0; step < 20; ++step) {
      if (const auto found = detector.observe(Times{usual, slow, usual})) text += describe(*found);
    }
    return text;
  };
  const std::string begin = "rank 1 is slow: it computes 1.95 times as long as the others, over 16 steps, most of it ";
  const std::string end = " (10.0 ms a step more); they wait for it";
  EXPECT_EQ(names({.between_us = 11'000, .forward_us = 3'000, .backward_us = 6'000, .step_us = 500}),
            begin + "between steps" + end);
  EXPECT_EQ(names({.between_us = 1'000, .forward_us = 13'000, .backward_us = 6'000, .step_us = 500}),
            begin + "in the forward" + end);
  EXPECT_EQ(names({.between_us = 1'000, .forward_us = 3'000, .backward_us = 16'000, .step_us = 500}),
            begin + "in the backward" + end);
  EXPECT_EQ(names({.between_us = 1'000, .forward_us = 3'000, .backward_us = 6'000, .step_us = 10'500}),
            begin + "in step()" + end);
}

TEST(Straggler, OneRankHasNobodyToBeComparedWith) {
  StragglerDetector detector;
  for (int step = 0; step < 100; ++step) EXPECT_FALSE(detector.observe(Times{{.forward_us = 100'000}}));
}

}  // namespace
}  // namespace zeroth
