#include <zeroth/base/error.h>
#include <zeroth/parallel/task_shares.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace zeroth {
namespace {

using Plan = std::vector<std::vector<TaskPart>>;

double most_of(const Plan& plan, const std::vector<double>& loads) {
  double most = 0.0;
  for (const auto& of_rank : plan) {
    double sum = 0.0;
    for (const TaskPart& part : of_rank) sum += loads[static_cast<std::size_t>(part.task)] / part.parts;
    most = std::max(most, sum);
  }
  return most;
}

/// Of all plans: each task alone on k ranks, or whole on one of the ranks that are left.
double least_of_all(const std::vector<double>& loads, std::size_t task, std::vector<double>& sums, int free_ranks) {
  if (task == loads.size()) return sums.empty() ? 0.0 : *std::ranges::max_element(sums);
  double least = std::numeric_limits<double>::infinity();
  for (int parts = 2; parts <= free_ranks; ++parts)
    least = std::min(least, std::max(loads[task] / parts, least_of_all(loads, task + 1, sums, free_ranks - parts)));
  for (std::size_t rank = 0; rank < sums.size(); ++rank) {
    sums[rank] += loads[task];
    least = std::min(least, least_of_all(loads, task + 1, sums, free_ranks));
    sums[rank] -= loads[task];
  }
  if (free_ranks > 0) {
    sums.push_back(loads[task]);
    least = std::min(least, least_of_all(loads, task + 1, sums, free_ranks - 1));
    sums.pop_back();
  }
  return least;
}

TEST(TaskShares, HeavyTasksHaveSeveralRanksAndLightOnesShareOne) {
  const std::vector<double> loads = {2.0, 8.0, 2.0, 4.0};
  EXPECT_EQ(share_tasks(loads, 4), (Plan{{{.task = 1, .part = 0, .parts = 2}},
                                         {{.task = 1, .part = 1, .parts = 2}},
                                         {{.task = 3}},
                                         {{.task = 0}, {.task = 2}}}));
  EXPECT_EQ(share_tasks(loads, 1), (Plan{{{.task = 0}, {.task = 1}, {.task = 2}, {.task = 3}}}));
}

TEST(TaskShares, AreWithinTheirBoundOfTheBestPlan) {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    const auto tasks = 1 + random() % 5;
    const int ranks = 1 + static_cast<int>(random() % 5);
    std::vector<double> loads;
    for (std::uint32_t task = 0; task < tasks; ++task)
      loads.push_back(static_cast<double>(1 + random() % (task % 2 == 0 ? 10 : 60)));
    const Plan plan = share_tasks(loads, ranks);
    ASSERT_EQ(plan.size(), static_cast<std::size_t>(ranks));
    std::vector<double> shares(loads.size(), 0.0);
    for (const auto& of_rank : plan) {
      for (const TaskPart& part : of_rank) {
        shares[static_cast<std::size_t>(part.task)] += 1.0 / part.parts;
        EXPECT_TRUE(part.parts == 1 || of_rank.size() == 1) << "a split task has its ranks for itself";
      }
    }
    for (const double share : shares) EXPECT_DOUBLE_EQ(share, 1.0);
    std::vector<double> sums;
    const double best = least_of_all(loads, 0, sums, ranks);
    EXPECT_LE(most_of(plan, loads), best * 4 / 3 * (1 + 1e-12)) << "round " << round;
    EXPECT_GE(most_of(plan, loads), best * (1 - 1e-12));
    EXPECT_EQ(plan, share_tasks(loads, ranks));
  }
}

TEST(TaskShares, RefuseWhatIsNoPlan) {
  EXPECT_THROW((void)share_tasks({}, 2), Error);
  const std::vector<double> loads = {1.0, 0.0};
  EXPECT_THROW((void)share_tasks(loads, 2), Error);
  EXPECT_THROW((void)share_tasks(std::span(loads).first(1), 0), Error);
}

}  // namespace
}  // namespace zeroth
