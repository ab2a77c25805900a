// Failpoints of the NCCL room, on fakes of NCCL and CUDA. The ranks are threads here: which of them strikes is for the
// number of the hit to say, and a death cannot be had.
#include "support/nccl_ranks.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/failpoint.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace zeroth {
namespace {

using test::NcclRank;
using test::NcclWorld;
using test::submit;
using test::sum_of;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

/// Calls, a part and calls in it, and nobody goes before all are done; tells the others of an error, as programs do.
void live_over_nccl(NcclRank& rank) {
  try {
    auto* const data = rank.room<float>(4);
    submit(rank, sum_of(data, 4)).wait();
    const auto part = rank.group->split(0, rank.rank, "part");
    const Collective call = sum_of(data, 4);
    part->submit({&call, 1}, rank.stream).wait();
    const Collective barrier{.kind = CollectiveKind::kBarrier};
    rank.group->submit({&barrier, 1}, make_cpu_device()->make_stream("the end")).wait();
  } catch (const Error& error) {
    rank.group->abort(error);
    throw;
  }
}

TEST(NcclFailpoints, WhoeverFailsAtASiteTheOthersEndInTime) {
  constexpr int kRanks = 3;
  int sites = 0;
  for (const Failpoint& site : failpoints()) {
    if (!site.name.starts_with("nccl.")) continue;
    ++sites;
    for (int hit = 1; hit <= 2 * kRanks; ++hit) {  // in the world, and in the part
      SCOPED_TRACE(site.name + " hit " + std::to_string(hit));
      NcclWorld world(kRanks);
      arm_failpoints(parse_failpoints(site.name + "@hit=" + std::to_string(hit) + ":throw"), 0);
      const Deadline in_time(Milliseconds{10'000});
      const auto errors = world.try_ranks(live_over_nccl);
      disarm_failpoints();
      EXPECT_FALSE(in_time.passed());
      const auto planted = std::ranges::count_if(errors, [&](const std::string& error) {
        return error.starts_with("[INTERNAL] planted failure at " + site.name);
      });
      EXPECT_EQ(planted, 1) << ::testing::PrintToString(errors);
      EXPECT_THAT(errors, Each(Not(IsEmpty())));
      EXPECT_THAT(errors, Each(Not(HasSubstr("[TIMEOUT]"))));
      EXPECT_THAT(world.gpu.violations(), IsEmpty());
      EXPECT_EQ(world.gpu.living_comms(), 0U);
    }
  }
  EXPECT_EQ(sites, 3);
}

TEST(NcclFailpoints, ASlowRankIsNoFailure) {
  for (const char* const spec : {"nccl.open@hit=2:sleep=50", "nccl.give@hit=3:sleep=50", "nccl.wait@hit=1:sleep=50"}) {
    NcclWorld world(3);
    arm_failpoints(parse_failpoints(spec), 0);
    const auto errors = world.try_ranks(live_over_nccl);
    disarm_failpoints();
    EXPECT_THAT(errors, Each(IsEmpty())) << spec;
  }
}

TEST(NcclFailpoints, AnAbortThatIsLateStillEndsTheOthers) {
  NcclWorld world(2);
  arm_failpoints(parse_failpoints("nccl.give@hit=2:throw;abort.nccl@hit=1:sleep=300"), 0);
  const auto errors = world.try_ranks(live_over_nccl);
  disarm_failpoints();
  EXPECT_THAT(errors, Each(HasSubstr("planted failure at nccl.give")));
  EXPECT_EQ(world.gpu.living_comms(), 0U);
}

}  // namespace
}  // namespace zeroth
