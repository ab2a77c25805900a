// Sends and receives between two ranks, on every backend.
#include "conformance/world_runner.h"

#include <zeroth/comm/decorators.h>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

class Points : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, Points, ::testing::ValuesIn(several_matched_ranks()), name_of_param);

/// Some beside a header in a ring, some that fill it, some that flow through it or lie in a window.
constexpr std::int64_t kCounts[] = {0, 1, 7, 1023, 8192, 16'385, 300'007};

template <class T>
T value_of(int from, int to, std::int64_t index) {
  const auto mixed =
      static_cast<std::uint64_t>(index) * 7919 + static_cast<std::uint64_t>(from) * 31 + static_cast<std::uint64_t>(to);
  return static_cast<T>(static_cast<float>(mixed % 251));
}

template <class T>
void fill(std::span<T> data, int from, int to) {
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = value_of<T>(from, to, static_cast<std::int64_t>(i));
}

template <class T>
void expect_message(std::span<const T> data, int from, int to) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    const T expected = value_of<T>(from, to, static_cast<std::int64_t>(i));
    if (std::memcmp(&data[i], &expected, sizeof expected) != 0) {
      throw std::runtime_error(fmt::format("element {} of {} from rank {} is wrong", i, data.size(), from));
    }
  }
}

/// Every rank sends to the next and receives from the one before, at once.
template <class T>
void pass_around(const Communicator& comm, std::span<T> out, std::span<T> in) {
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  fill(out, comm.rank(), next);
  const Collective calls[] = {comm.send_call(std::span<const T>(out), next, {.unit = 3}),
                              comm.recv_call(in, previous, {.unit = 3})};
  comm.batch(calls);
  expect_message(std::span<const T>(in), previous, comm.rank());
}

TEST_P(Points, AllRanksPassMessagesAroundAtOnce) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    constexpr std::size_t kBytes = 300'032 * sizeof(double);
    for (const bool attached : {false, true}) {
      if (attached && !backend->capabilities().one_sided) continue;
      const ArenaKind kind = attached ? backend->capabilities().window_kind : ArenaKind::kPrivate;
      const Arena arena = Arena::create(kind, 2 * kBytes, "test");
      PeerWindow window;
      if (attached) window = backend->attach(arena, "test");
      const auto around = [&]<class T>(T /*tag*/, std::int64_t count) {
        const auto elements = static_cast<std::size_t>(count);
        pass_around<T>(comm, {reinterpret_cast<T*>(arena.data()), elements},
                       {reinterpret_cast<T*>(arena.data() + kBytes), elements});
      };
      for (const std::int64_t count : kCounts) {
        around(double{}, count);
        around(float{}, count);
        around(BFloat16{}, count);
        around(Float16{}, count);
        around(std::int32_t{}, count);
        around(std::uint8_t{}, count);
      }
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Points, MessagesOfAPairArriveInOrderWhateverTheirSizes) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    if (rank != 0 && rank != last) return;
    for (int round = 0; round < 200; ++round) {
      const auto count = static_cast<std::size_t>(round % 7 == 0 ? 40'000 + round : round % 5);
      const MessageTag tag{.unit = round % 3, .label = static_cast<std::uint32_t>(round)};
      std::vector<std::int64_t> data(count, round);
      if (rank == 0) {
        comm.send(std::span<const std::int64_t>(data), last, tag);
      } else {
        std::ranges::fill(data, -1);
        comm.recv(std::span(data), 0, tag);
        require(std::ranges::count(data, round) == static_cast<std::ptrdiff_t>(count),
                fmt::format("message {}", round));
      }
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Points, ABatchKeepsTheOrderOfEachPairAndFinishesInAny) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    constexpr std::size_t kLarge = 50'000;
    // Two messages between any two ranks, a small and a large one.
    std::vector<std::vector<float>> out;
    std::vector<std::vector<float>> in;
    std::vector<Collective> calls;
    for (int step = 1; step < comm.size(); ++step) {
      for (const std::size_t count : {std::size_t{5}, kLarge}) {
        out.emplace_back(count);
        in.emplace_back(count);
        const int to = (rank + step) % comm.size();
        const int from = (rank + comm.size() - step) % comm.size();
        fill(std::span(out.back()), rank, to);
        calls.push_back(comm.recv_call(std::span(in.back()), from));
        calls.push_back(comm.send_call(std::span<const float>(out.back()), to));
      }
    }
    comm.batch(calls);
    for (std::size_t index = 0; index < in.size(); ++index) {
      expect_message(std::span<const float>(in[index]), calls[2 * index].root, rank);
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// What a transport over messages need not do.
class SharedPoints : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, SharedPoints, ::testing::ValuesIn(several_ranks()), name_of_param);

TEST_P(SharedPoints, SmallMessagesWaitForNobody) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    std::vector<float> out(1000);
    std::vector<float> in(1000);
    const int peer = rank == 0 ? 1 : 0;
    fill(std::span(out), rank, peer);
    if (rank < 2) {
      for (int message = 0; message < 10; ++message) comm.send(std::span<const float>(out), peer);
    }
    comm.barrier();
    if (rank < 2) {
      for (int message = 0; message < 10; ++message) comm.recv(std::span(in), peer);
      expect_message(std::span<const float>(in), peer, rank);
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(SharedPoints, OfASmallMessageThatIsAnotherOneTheReceiverTellsAndTheNextSend) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report =
      run_world(GetParam(),
                [](int rank, const std::shared_ptr<CommBackend>& backend) {
                  const Communicator comm(backend);
                  std::vector<float> data(3);
                  if (rank == 0) {
                    comm.send(std::span<const float>(data), 1, {.unit = 1});  // fits the ring: done
                    for (;;) comm.send(std::span<const float>(data), 1, {.unit = 1});
                  }
                  if (rank == 1) comm.recv(std::span(data), 0, {.unit = 2});
                },
                {.abort_on_failure = false});
  ASSERT_EQ(report.failures.size(), 2U) << report.text();
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    EXPECT_THAT(failure.text, HasSubstr("send#0 float32, 3 elements (12 B) to rank 1, unit 1"));
    EXPECT_THAT(failure.text, HasSubstr("recv#0 float32, 3 elements (12 B) from rank 0, unit 2"));
  }
}

TEST_P(Points, BatchesMeetSingleCalls) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    for (const std::size_t count : {std::size_t{4}, std::size_t{50'000}}) {
      std::vector<float> out(count);
      std::vector<float> in(count);
      const int next = (rank + 1) % comm.size();
      const int previous = (rank + last) % comm.size();
      fill(std::span(out), rank, next);
      // Round a circle: only rank 0 does both at once.
      if (rank == 0) {
        const Collective calls[] = {comm.send_call(std::span<const float>(out), next),
                                    comm.recv_call(std::span(in), previous)};
        comm.batch(calls);
      } else {
        comm.recv(std::span(in), previous);
        comm.send(std::span<const float>(out), next);
      }
      expect_message(std::span<const float>(in), previous, rank);
      // The first rank takes from all, in an order in which the others cannot send: each hands on to the one below when
      // it is done.
      if (rank == 0) {
        std::vector<std::vector<float>> from(static_cast<std::size_t>(comm.size()), std::vector<float>(count));
        std::vector<Collective> calls;
        for (int peer = 1; peer <= last; ++peer)
          calls.push_back(comm.recv_call(std::span(from[static_cast<std::size_t>(peer)]), peer));
        comm.batch(calls);
        for (int peer = 1; peer <= last; ++peer)
          expect_message(std::span<const float>(from[static_cast<std::size_t>(peer)]), peer, 0);
      } else {
        std::int32_t turn = 0;
        if (rank < last) comm.recv(std::span(&turn, 1), rank + 1);
        fill(std::span(out), rank, 0);
        comm.send(std::span<const float>(out), 0);
        if (rank > 1) comm.send(std::span<const std::int32_t>(&turn, 1), rank - 1);
      }
    }
    // Two in one batch on one side, one after the other on the other.
    if (rank == 0) {
      const std::vector<double> first(30'000, 1);
      const std::vector<double> second(5, 2);
      const Collective calls[] = {comm.send_call(std::span<const double>(first), last),
                                  comm.send_call(std::span<const double>(second), last)};
      comm.batch(calls);
    } else if (rank == last) {
      std::vector<double> first(30'000);
      std::vector<double> second(5);
      comm.recv(std::span(first), 0);
      comm.recv(std::span(second), 0);
      require(first.back() == 1 && second.back() == 2, "two messages in order");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Points, OtherRanksAndOtherCallsTakeNoNotice) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const std::shared_ptr<CommBackend> part = backend->split(0, -rank, "turned");
    const Communicator turned(part);
    for (int round = 0; round < 30; ++round) {
      std::vector<std::int64_t> sum(static_cast<std::size_t>(round % 2 == 0 ? 3 : 20'000), rank);
      std::vector<std::int32_t> data(20'000, round);
      // A chain through the ranks, in one group or the other, between two sums.
      const Communicator& group = round % 3 == 0 ? turned : comm;
      if (group.rank() > 0) group.recv(std::span(data), group.rank() - 1);
      if (group.rank() == 0) std::ranges::fill(data, 7 * round);
      if (group.rank() + 1 < group.size()) group.send(std::span<const std::int32_t>(data), group.rank() + 1);
      require(std::ranges::count(data, 7 * round) == 20'000, "the chain's data");
      comm.all_reduce(std::span(sum));
      require(sum.back() == comm.size() * (comm.size() - 1) / 2, "the sum between");
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Points, OnlyTheReceiverCountsBytes) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto table = std::make_shared<TrafficTable>();
    backend->set_observer(table);
    const Communicator comm(backend);
    std::vector<double> data(70'000);
    if (rank == 0) comm.send(std::span<const double>(data), 1);
    if (rank == 1) comm.recv(std::span(data), 0);
    const TrafficRow sent = table->row(CollectiveKind::kSend);
    const TrafficRow received = table->row(CollectiveKind::kRecv);
    require(sent == TrafficRow{.calls = rank == 0 ? 1U : 0U}, "sent");
    require(received == (rank == 1 ? TrafficRow{.calls = 1, .bytes = 560'000} : TrafficRow{}), "received");
    backend->set_observer(nullptr);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// What goes wrong between ranks 0 and 1.
struct Case {
  std::string name;
  std::function<void(const Communicator&)> sends;
  std::function<void(const Communicator&)> receives;
  std::vector<std::string> both_sides;
};

std::vector<Case> cases() {
  const auto send = [](std::size_t count, MessageTag tag) {
    return [count, tag](const Communicator& comm) {
      const std::vector<float> data(count, 1.0F);
      comm.send(std::span<const float>(data), 1, tag);
    };
  };
  const auto recv = [](std::size_t count, MessageTag tag) {
    return [count, tag](const Communicator& comm) {
      std::vector<float> data(count);
      comm.recv(std::span(data), 0, tag);
    };
  };
  const auto recv_integers = [](const Communicator& comm) {
    std::vector<std::int32_t> data(50'000);
    comm.recv(std::span(data), 0, {.unit = 1});
  };
  return {
      {"OtherSize",
       send(50'000, {.unit = 1}),
       recv(50'001, {.unit = 1}),
       {"send#0 float32, 50000 elements", "recv#0 float32, 50001 elements"}},
      {"OtherTag", send(50'000, {.unit = 1}), recv(50'000, {.unit = 2}), {"to rank 1, unit 1", "from rank 0, unit 2"}},
      {"OtherDtype", send(50'000, {.unit = 1}), recv_integers, {"send#0 float32", "recv#0 int32"}},
  };
}

/// Where messages are compared.
class ComparedPoints : public Points {};
INSTANTIATE_TEST_SUITE_P(Backends, ComparedPoints, ::testing::ValuesIn([] {
                           std::vector<WorldParam> worlds = several_matched_ranks();
                           std::erase_if(worlds, [](const WorldParam& world) { return !compares_messages(world); });
                           return worlds;
                         }()),
                         name_of_param);

TEST_P(ComparedPoints, AnotherMessageThanExpectedIsNamedOnBothSides) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const bool messages = over_messages(GetParam());
  WorldOptions options{.abort_on_failure = false};
  if (messages)
    options.comm.timeout = Milliseconds{2'000};  // of the sender, who sees nothing; and of the meeting before
  for (const Case& item : cases()) {
    SCOPED_TRACE(item.name);
    const RankReport report = run_world(
        GetParam(),
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const Communicator comm(backend);
          if (rank == 0) item.sends(comm);
          if (rank == 1) item.receives(comm);
        },
        options);
    std::set<int> who;
    for (const RankFailure& failure : report.failures) {
      if (failure.rank < 2)
        who.insert(failure.rank);  // another one hears of it, too, if it is still in the meeting before
      if (failure.rank == 0 && (messages || tells_others(GetParam()))) continue;
      EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
      for (const std::string& side : item.both_sides) EXPECT_THAT(failure.text, HasSubstr(side));
    }
    EXPECT_EQ(who, (std::set{0, 1})) << report.text();
  }
}

TEST_P(Points, WhatOneRankCanSeeIsRefusedAndLeavesTheGroupWhole) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    std::vector<float> data(4, 1.0F);
    for (const int peer : {rank, -1, comm.size()}) {
      try {
        comm.send(std::span<const float>(data), peer);
        require(false, fmt::format("a message to rank {} was taken", peer));
      } catch (const Error& error) {
        require(error.code() == ErrorCode::kUsage, error.what());
        require(std::string(error.what()).find(peer == rank ? "to itself" : "not in the group") != std::string::npos,
                error.what());
      }
    }
    comm.all_reduce(std::span(data));
    require(data[0] == static_cast<float>(comm.size()), "the group was harmed");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(Points, ASendThatNobodyTakesEndsAtTheDeadlineAndSaysHowFarItCame) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  WorldOptions options;
  options.comm.timeout = Milliseconds{300};
  options.abort_on_failure = false;
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        if (rank == 0) {
          const std::vector<float> data(50'000);
          comm.send(std::span<const float>(data), 1, {.unit = 2});
        } else {
          std::this_thread::sleep_for(Milliseconds{2'500});  // also where the machine stands still meanwhile
        }
      },
      options);
  ASSERT_EQ(report.failures.size(), 1U) << report.text();
  const RankFailure& failure = report.failures.front();
  EXPECT_EQ(failure.code, ErrorCode::kTimeout) << failure.text;
  EXPECT_THAT(failure.text, HasSubstr("send#0 float32, 50000 elements (200000 B) to rank 1, unit 2, label 0"));
  EXPECT_EQ(failure.text.find("from rank"), std::string::npos) << failure.text;
  if (!over_messages(GetParam()) && compares_messages(GetParam())) {
    EXPECT_THAT(failure.text, HasSubstr("of 200000 B sent"));
  }
}

TEST(PointsMemory, ARingIsCountedOnceSomethingIsSentThere) {
  CommOptions options = quick_options();
  options.ledger = MemoryLedger::create();
  const RankReport report =
      run_world({"inproc", 3},
                [&](int rank, const std::shared_ptr<CommBackend>& backend) {
                  const Communicator comm(backend);
                  const std::size_t before = transport_bytes("inproc", 3, options);
                  require(backend->memory_bytes() == before, "before");
                  std::vector<float> data(10);
                  for (int round = 0; round < 3; ++round) {
                    if (rank == 0) comm.send(std::span<const float>(data), 1);
                    if (rank == 0) comm.send(std::span<const float>(data), 2);
                    if (rank != 0) comm.recv(std::span(data), 0);
                  }
                  constexpr std::size_t kRing = std::size_t{64} << 10U;
                  require(backend->memory_bytes() == before + (rank == 0 ? 2 * kRing : 0), "after");
                },
                {.comm = options});
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_EQ(options.ledger->live().total(), 0U);
}

}  // namespace
}  // namespace zeroth::test
