#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::RankReport;
using test::require;
using test::run_ranks;
using test::try_ranks;

TEST(CountingBackend, CountsByGroupAndKind) {
  run_ranks(4, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    const auto counting = std::make_shared<CountingBackend>(backend->split(0, rank, "all"), table);
    const std::shared_ptr<CommBackend> half = counting->split(rank / 2, rank, "half");
    std::vector<float> data(100'000);
    Communicator(counting).broadcast(std::span(data), 0);
    Communicator(half).all_reduce(std::span(data));
    half->count_one_sided(CollectiveKind::kReduceScatter, 0, 77);
    Communicator(half).barrier();
    require(table->row("world/all", CollectiveKind::kBroadcast) ==
                TrafficRow{.calls = 1, .bytes = rank == 0 ? 0U : 400'000U},
            table->text());
    const TrafficRow reduced = table->row("world/all/half", CollectiveKind::kAllReduce);
    require(reduced.calls == 1 && reduced.bytes > 390'000 && reduced.bytes < 410'000, table->text());
    require(
        table->row(CollectiveKind::kReduceScatter) == TrafficRow{.one_sided_calls = 1, .one_sided_bytes = 77},
        table->text());
    require(table->bytes() == reduced.bytes + 77 + (rank == 0 ? 0U : 400'000U), "total");
    require(table->text().find("world/all/half") != std::string::npos, table->text());
    table->reset();
    require(table->bytes() == 0 && table->control_bytes() == 0, "reset");
  });
}

TEST(FaultyBackend, AFailureIsThrownAtTheGivenCall) {
  const RankReport report = try_ranks(2, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto faulty = std::make_shared<FaultyBackend>(backend->split(0, rank, "faulty"),
                                                        FaultPlan{.fail_at_call = rank == 1 ? 2 : -1});
    const Communicator comm(faulty);
    for (int call = 0; call < 5; ++call) comm.barrier();
  });
  ASSERT_EQ(report.failures.size(), 2U) << report.text();
  EXPECT_NE(report.of(1)->text.find("planted failure"), std::string::npos) << report.text();
  // Rank 0 learns of it from the abort, or from the empty seat, whichever is first.
  EXPECT_TRUE(report.of(0)->code == ErrorCode::kAborted || report.of(0)->code == ErrorCode::kPeerLost)
      << report.text();
}

TEST(FaultyBackend, ADroppedCallIsSeenByTheOthers) {
  const RankReport report =
      try_ranks(3,
                [](int rank, const std::shared_ptr<CommBackend>& backend) {
                  const auto faulty = std::make_shared<FaultyBackend>(
                      backend->split(0, rank, "faulty"), FaultPlan{.drop_call = rank == 2 ? 1 : -1});
                  const Communicator comm(faulty);
                  std::vector<float> data(8);
                  for (std::int32_t unit = 0; unit < 4; ++unit)
                    comm.all_reduce(std::span(data), {.unit = unit, .label = 0});
                },
                {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 3U) << report.text();
  for (const test::RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    EXPECT_NE(failure.text.find("unit 1"), std::string::npos) << failure.text;
    EXPECT_NE(failure.text.find("unit 2"), std::string::npos) << failure.text;
  }
}

TEST(FaultyBackend, AFrozenThreadIsATimeoutThatNamesIt) {
  test::ThreadRanksOptions options{.abort_on_failure = false};
  options.comm.timeout = Milliseconds{150};
  const RankReport report = try_ranks(
      2,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        FaultyBackend faulty(backend->split(0, rank, "faulty"),
                             FaultPlan{.freeze_at_call = rank == 1 ? 0 : -1, .freeze = Milliseconds{700}});
        const auto stream = Communicator(backend).stream();
        const Collective barrier{.kind = CollectiveKind::kBarrier};
        faulty.submit({&barrier, 1}, stream).wait();
      },
      options);
  ASSERT_NE(report.of(0), nullptr) << report.text();
  EXPECT_EQ(report.of(0)->code, ErrorCode::kTimeout) << report.text();
  EXPECT_NE(report.of(0)->text.find("rank 1"), std::string::npos) << report.text();
}

TEST(FaultyBackend, EqualSeedsDelayAlike) {
  // Delays change time only; the numbers of calls and the values stay.
  for (const std::uint64_t seed : {1U, 2U}) {
    run_ranks(2, [seed](int rank, const std::shared_ptr<CommBackend>& backend) {
      const auto faulty = std::make_shared<FaultyBackend>(
          backend->split(0, rank, "faulty"),
          FaultPlan{.seed = seed, .delay_probability = 1, .max_delay = std::chrono::microseconds{50}});
      const Communicator comm(faulty);
      std::vector<std::int32_t> data(3, 1);
      for (int call = 0; call < 20; ++call) comm.all_reduce(std::span(data));
      require(data[2] == 1 << 20, "sum");
      require(faulty->calls() == 20, "calls");
    });
  }
}

}  // namespace
}  // namespace zeroth
