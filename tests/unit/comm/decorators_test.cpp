#include "comm/decorators/faulty_backend.h"
#include "comm/decorators/slow_link_backend.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/rank_activity.h>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
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
    require(table->row(CollectiveKind::kReduceScatter) == TrafficRow{.one_sided_calls = 1, .one_sided_bytes = 77},
            table->text());
    require(table->bytes() == reduced.bytes + 77 + (rank == 0 ? 0U : 400'000U), "total");
    require(table->text().find("world/all/half") != std::string::npos, table->text());
    table->reset();
    require(table->bytes() == 0 && table->control_bytes() == 0, "reset");
  });
}

/// Two nodes of two ranks in shared memory, 1 MB/s between them.
TEST(SlowLinkBackend, BytesFromOtherNodesTakeTheirTimeAndAreCountedAllTheSame) {
  test::ThreadRanksOptions options;
  options.comm.nodes = {0, 0, 1, 1};
  run_ranks(
      4,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const auto table = std::make_shared<TrafficTable>();
        const LinkSpeed speed{.bytes_per_second = 1e6, .latency = std::chrono::milliseconds{1}, .burst_bytes = 0};
        const auto counting = std::make_shared<CountingBackend>(
            std::make_unique<SlowLinkBackend>(backend->split(0, rank, "slow"), speed), table);
        const auto seconds = [](const auto& call) {
          const auto begin = SteadyClock::now();
          call();
          return std::chrono::duration<double>(SteadyClock::now() - begin).count();
        };
        const Communicator comm(counting);
        std::vector<float> part(5'000);
        std::vector<float> whole(20'000);
        const double gathered = seconds([&] { comm.all_gather(std::span<const float>(part), std::span(whole)); });
        require(table->far_bytes() == 40'000, table->text());
        require(gathered >= 0.041, "40 kB from the other node at 1 MB/s");  // a lower bound: sleeps are never short
        // Inside a node nothing is slow, and a part of the group has the same link.
        const std::shared_ptr<CommBackend> node = counting->split(rank / 2, rank, "node");
        Communicator(node).all_reduce(std::span(whole));
        require(table->far_bytes() == 40'000, "a node's own");
        const std::shared_ptr<CommBackend> across = counting->split(rank % 2, rank, "across");
        const double reduced = seconds([&] { Communicator(across).all_reduce(std::span(whole)); });
        require(reduced >= 0.08, "80 kB at 1 MB/s");
        const double pulled = seconds([&] { counting->count_one_sided(CollectiveKind::kAllGather, 3 - rank, 30'000); });
        require(pulled >= 0.03, "30 kB that the caller copied");
        require(seconds([&] { counting->count_one_sided(CollectiveKind::kAllGather, rank ^ 1, 1'000'000'000); }) < 1,
                "a neighbour's");
      },
      options);
}

TEST(SlowLinkBackend, ABurstIsFreeAndIsSavedUpNoFurther) {
  test::ThreadRanksOptions options;
  options.comm.nodes = {0, 1};
  run_ranks(
      2,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const LinkSpeed speed{.bytes_per_second = 1e5, .burst_bytes = 60'000};
        SlowLinkBackend slow(backend->split(0, rank, "slow"), speed);
        const auto pull_twice = [&] {
          const auto begin = SteadyClock::now();
          for (int call = 0; call < 2; ++call) slow.count_one_sided(CollectiveKind::kAllGather, 1 - rank, 40'000);
          const double seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
          require(seconds >= 0.2, "80 kB, of which 60 are free, took " + std::to_string(seconds) +
                                      " s");  // a lower bound: sleeps are never short
          require(seconds < 0.8, "nothing was free");
        };
        pull_twice();
        std::this_thread::sleep_for(Milliseconds{1'300});  // time for 130 kB; the link keeps 60
        pull_twice();
      },
      options);
}

/// 60 kB at 1 MB/s.
TEST(SlowLinkBackend, CarriesAStartedMessageWhileItsRankDoesSomethingElse) {
  test::ThreadRanksOptions options;
  options.comm.nodes = {0, 1};
  run_ranks(
      2,
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const LinkSpeed speed{.bytes_per_second = 1e6, .burst_bytes = 0};
        const Communicator comm(std::make_shared<SlowLinkBackend>(backend->split(0, rank, "slow"), speed));
        const auto table = std::make_shared<TrafficTable>();
        comm.backend().set_observer(table);
        std::vector<std::uint8_t> data(60'000);
        for (const bool computes : {false, true}) {
          if (rank == 0) {
            comm.start_send(std::span<const std::uint8_t>(data), 1)->wait();
            continue;
          }
          const auto begin = SteadyClock::now();
          const auto pending = comm.start_recv(std::span(data), 0);
          const std::uint64_t all = computes ? 120'000 : 60'000;
          bool done = false;
          while (table->far_bytes() < all) done = pending->done();
          if (computes) {
            std::this_thread::sleep_for(Milliseconds{70});
            require(pending->done(), "the link did not go on");
          } else {
            require(!done, "it took no time");
            pending->wait();
            require(SteadyClock::now() - begin >= Milliseconds{60}, "60 kB at 1 MB/s");
          }
        }
      },
      options);
}

TEST(SlowLinkBackend, AnErrorIsTheWorksAndTheStreamGoesOn) {
  run_ranks(2, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto slow = std::make_shared<SlowLinkBackend>(backend->split(0, rank, "slow"), LinkSpeed{});
    const Communicator comm(slow);
    std::vector<float> data(static_cast<std::size_t>(4 + rank));
    const Work failed = comm.all_reduce_async(std::span<const float>(data), std::span(data), comm.stream());
    try {
      failed.wait();
      throw std::runtime_error("sizes differ");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kMismatch, error.what());
    }
    bool ran = false;
    comm.stream().enqueue([&] { ran = true; });
    comm.stream().synchronize();
    require(ran, "the stream stays broken");
  });
}

/// A transport that compares nothing: what is compared before a call is compared by nobody else.
class Uncompared final : public ForwardingBackend {
 public:
  explicit Uncompared(std::unique_ptr<CommBackend> group) : ForwardingBackend(std::move(group)) {}
  Work submit(std::span<const Collective> /*collectives*/, const Stream& stream) override {
    ++calls;
    return {stream.record(), {}};
  }
  int calls = 0;
};

struct CheckedGroup {
  Uncompared* inner;
  std::shared_ptr<CommBackend> backend;
  explicit CheckedGroup(CommBackend& base) {
    auto uncompared = std::make_unique<Uncompared>(base.split(0, base.rank(), "data"));
    inner = uncompared.get();
    backend = std::make_shared<CheckedBackend>(std::move(uncompared), base.split(0, base.rank(), "side"));
  }
};

TEST(CheckedBackend, DifferentCallsAreAMismatchOfAllRanksWithBothSidesAndAreNotMade) {
  struct Case {
    std::function<void(const Communicator&)> most;
    std::function<void(const Communicator&)> last;
    std::vector<std::string> sides;
    int made;  ///< calls before
  };
  const auto sum = [](auto zero, std::size_t count, std::int32_t unit) {
    return [=](const Communicator& comm) {
      std::vector<decltype(zero)> data(count, zero);
      comm.all_reduce(std::span(data), {.unit = unit});
    };
  };
  const auto both = [](const auto& first, const auto& second) {
    return [=](const Communicator& comm) {
      first(comm);
      second(comm);
    };
  };
  const auto parts = [](std::int64_t to_last) {
    return [=](const Communicator& comm) {
      std::vector<std::int64_t> counts(3, 1);
      if (comm.rank() == 0) counts[2] = to_last;
      const std::vector<float> in(comm.rank() == 0 ? static_cast<std::size_t>(2 + to_last) : 3);
      std::vector<float> out(3);
      comm.all_to_all(std::span<const float>(in), std::span(out), counts, {1, 1, 1});
    };
  };
  const std::vector<Case> cases{
      {both(sum(1.0F, 8, 1), sum(1.0F, 8, 2)), sum(1.0F, 8, 2), {"all_reduce#0", "unit 1", "unit 2"}, 0},  // skipped
      {both(sum(1.0F, 8, 1), sum(1.0F, 8, 2)),
       both(sum(1.0F, 8, 2), sum(1.0F, 8, 1)),
       {"all_reduce#0", "unit 1", "unit 2"},
       0},  // swapped
      {both(sum(1.0F, 8, 1), sum(1.0F, 8, 2)),
       both(sum(1.0F, 8, 1), sum(1.0F, 9, 2)),
       {"all_reduce#1", "(32 B)", "(36 B)"},
       1},                                                                     // longer
      {sum(1.0F, 8, 1), sum(std::int32_t{1}, 8, 1), {"float32", "int32"}, 0},  // of another type
      {parts(5),
       parts(5),
       {"5 elements, which rank 0 gives to rank 2", "1 elements, which rank 2 takes from rank 0"},
       0}};
  for (const Case& item : cases) {
    const auto begin = SteadyClock::now();
    const RankReport report =
        try_ranks(3,
                  [&](int rank, const std::shared_ptr<CommBackend>& base) {
                    const CheckedGroup group(*base);
                    const Communicator comm(group.backend);
                    for (int attempt = 0; attempt < 2; ++attempt) {  // a broken group stays broken
                      try {
                        (rank == 2 ? item.last : item.most)(comm);
                        throw std::runtime_error("different calls were made");
                      } catch (const Error& error) {
                        require(error.code() == ErrorCode::kMismatch, error.what());
                        for (const std::string& side : item.sides)
                          require(std::string(error.what()).find(side) != std::string::npos, error.what());
                      }
                    }
                    require(group.inner->calls >= item.made, "calls before the mismatch");
                    base->split(0, rank, "end");  // the others still wait for nobody
                  },
                  {.abort_on_failure = false});
    EXPECT_TRUE(report.ok()) << report.text();
    EXPECT_LT(SteadyClock::now() - begin, std::chrono::seconds{5});
  }
}

TEST(CheckedBackend, EqualCallsAreMadeHoweverTheyArePutTogether) {
  run_ranks(3, [](int rank, const std::shared_ptr<CommBackend>& base) {
    const std::shared_ptr<CommBackend> whole =
        std::make_shared<CheckedBackend>(base->split(0, rank, "data"), base->split(0, rank, "side"));
    const auto table = std::make_shared<TrafficTable>();
    whole->set_observer(table);
    for (const std::shared_ptr<CommBackend>& backend :
         {whole, std::shared_ptr<CommBackend>(whole->split(0, -rank, "turned"))}) {
      const Communicator comm(backend);
      float one = 1;
      float two = 2;
      const auto sum = [](float& value) {
        auto* const bytes = reinterpret_cast<std::byte*>(&value);
        return Collective{.kind = CollectiveKind::kAllReduce,
                          .in_dtype = DType::kFloat32,
                          .out_dtype = DType::kFloat32,
                          .send = bytes,
                          .recv = bytes,
                          .counts = {1}};
      };
      const std::vector<Collective> calls{sum(one), sum(two)};
      if (rank == 0) {
        comm.batch(calls);
      } else {
        for (const Collective& call : calls) comm.batch({&call, 1});
      }
      require(one == 3 && two == 6, "sums");
      // What each rank gives to a sum in fp32 is its own matter.
      std::vector<float> wide(3, 1);
      std::vector<BFloat16> narrow(3, BFloat16(1.0F));
      float part = 0;
      if (rank == 1) {
        comm.reduce_scatter(std::span<const BFloat16>(narrow), std::span(&part, 1));
      } else {
        comm.reduce_scatter(std::span<const float>(wide), std::span(&part, 1));
      }
      require(part == 3, "a sum of two types");
    }
    require(table->control_bytes() > 0, "what is compared is counted");
    require(table->row("world/data", CollectiveKind::kAllReduce).calls == 2, table->text());
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
  // Rank 0 learns of it from the abort, or because rank 1 has left, whichever is first.
  EXPECT_TRUE(report.of(0)->code == ErrorCode::kAborted || report.of(0)->code == ErrorCode::kPeerLost) << report.text();
}

TEST(FaultyBackend, ADroppedCallIsSeenByTheOthers) {
  const RankReport report = try_ranks(3,
                                      [](int rank, const std::shared_ptr<CommBackend>& backend) {
                                        const auto faulty =
                                            std::make_shared<FaultyBackend>(backend->split(0, rank, "faulty"),
                                                                            FaultPlan{.drop_call = rank == 2 ? 1 : -1});
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

TEST(FaultyBackend, AStartedMessageIsACall) {
  const RankReport report =
      try_ranks(2,
                [](int rank, const std::shared_ptr<CommBackend>& backend) {
                  const auto faulty = std::make_shared<FaultyBackend>(
                      backend->split(0, rank, "faulty"),
                      FaultPlan{.fail_at_call = rank == 0 ? 3 : -1, .drop_call = rank == 0 ? 1 : -1});
                  const Communicator comm(faulty);
                  std::vector<float> data(8);
                  std::vector<std::unique_ptr<PendingPoints>> pending;
                  for (std::int32_t unit = 0; unit < 4; ++unit) {
                    pending.push_back(rank == 0 ? comm.start_send(std::span<const float>(data), 1, {.unit = unit})
                                                : comm.start_recv(std::span(data), 0, {.unit = unit}));
                  }
                  for (const auto& each : pending) each->wait();
                },
                {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 2U) << report.text();
  EXPECT_NE(report.of(0)->text.find("planted failure"), std::string::npos) << report.text();
  EXPECT_NE(report.of(0)->text.find("unit=3"), std::string::npos) << report.text();
  EXPECT_EQ(report.of(1)->code, ErrorCode::kMismatch) << report.text();  // the second one never went
  EXPECT_NE(report.of(1)->text.find("unit 2 on rank 0"), std::string::npos) << report.text();
}

TEST(RecordingBackend, ARecordOfAStartedMessageEndsWhenItsRankSeesThatItIsDone) {
  run_ranks(2, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto activity = std::make_shared<RankActivity>(rank, 2);
    const Communicator comm(std::make_shared<RecordingBackend>(backend->split(0, rank, "job"), activity));
    std::vector<double> data(6);
    const std::vector<Collective> calls(2, rank == 0 ? comm.send_call(std::span<const double>(data), 1, {.unit = 4})
                                                     : comm.recv_call(std::span(data), 0, {.unit = 4}));
    const auto pending = comm.start(calls);
    const auto expect = [&](bool ended) {
      const std::vector<CallRecord> records = activity->recorder().records();
      require(records.size() == 2, "a record each");
      for (std::size_t call = 0; call < 2; ++call) {
        const CallRecord& record = records[call];
        require(record.sequence == call && record.elements == 6 && record.unit == 4, "what it is");
        require(record.kind == (rank == 0 ? CollectiveKind::kSend : CollectiveKind::kRecv), "its kind");
        require((record.ended_ns != 0) == ended, ended ? "it has not ended" : "it has ended");
      }
    };
    expect(false);
    pending->wait();
    expect(true);
  });
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
