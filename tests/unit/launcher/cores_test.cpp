// How the processors of a host are shared out.
#include "launcher/cores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <set>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Shares = std::vector<std::vector<int>>;

/// Cores with `threads` processors each, the second threads numbered after all first ones, as Linux does it.
std::vector<Processor> machine(int nodes, int cores_per_node, int threads) {
  std::vector<Processor> result;
  const int cores = nodes * cores_per_node;
  for (int number = 0; number < cores * threads; ++number) {
    const int core = number % cores;
    result.push_back({.number = number, .node = core / cores_per_node, .package = core / cores_per_node, .core = core});
  }
  return result;
}

TEST(Cores, EveryRankGetsWholeCoresOfOneNode) {
  EXPECT_EQ(share_processors(machine(2, 2, 2), 2), (Shares{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(share_processors(machine(2, 2, 2), 4), (Shares{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(Cores, ThreadsOfCoresWhereThereAreMoreRanksThanCores) {
  EXPECT_EQ(share_processors(machine(1, 2, 2), 4), (Shares{{0}, {2}, {1}, {3}}));
  EXPECT_EQ(share_processors(machine(1, 2, 2), 3).size(), 3U);
}

TEST(Cores, TooFewAreNotShared) {
  EXPECT_THAT(share_processors(machine(1, 2, 1), 3), IsEmpty());
  EXPECT_THAT(share_processors({}, 1), IsEmpty());
}

TEST(Cores, WhatIsLeftOverIsNobodys) {
  EXPECT_EQ(share_processors(machine(1, 7, 1), 2), (Shares{{0, 1, 2}, {3, 4, 5}}));
}

TEST(Cores, ACoreWithFewerThreadsInTheMaskDoesNotMakeRanksUneven) {
  auto processors = machine(1, 2, 2);
  processors.pop_back();
  EXPECT_EQ(share_processors(processors, 2), (Shares{{0}, {1}}));
}

TEST(Cores, AnyMaskIsSharedEvenlyAndOnce) {
  EXPECT_TRUE(rc::check([] {
    std::vector<Processor> processors =
        machine(*rc::gen::inRange(1, 4), *rc::gen::inRange(1, 9), *rc::gen::inRange(1, 3));
    std::erase_if(processors, [](const Processor&) { return *rc::gen::inRange(0, 4) == 0; });
    const int ranks = *rc::gen::inRange(1, 20);
    const Shares shares = share_processors(processors, ranks);
    RC_ASSERT(shares.empty() == (processors.size() < static_cast<std::size_t>(ranks)));
    std::set<int> seen;
    for (const auto& share : shares) {
      RC_ASSERT(!share.empty());
      RC_ASSERT(share.size() == shares.front().size());
      for (const int number : share) RC_ASSERT(seen.insert(number).second);
    }
  }));
}

TEST(Cores, AreReadFromThisMachine) {
  const auto processors = processors_here();
  ASSERT_FALSE(processors.empty());
  EXPECT_THAT(plan_binding(BindCores::kOff, 1), IsEmpty());
  EXPECT_THAT(plan_binding(BindCores::kAuto, 1), IsEmpty());
  EXPECT_EQ(plan_binding(BindCores::kOn, 1).front().size(), processors.size());
  EXPECT_THAT(plan_binding(BindCores::kAuto, static_cast<int>(processors.size()) + 1), IsEmpty());
}

}  // namespace
}  // namespace zeroth::launcher
