// Sends and receives that are started and asked for later, on every backend.
#include "comm/decorators/faulty_backend.h"
#include "conformance/world_runner.h"
#include "support/sanitizer.h"
#include "support/tier.h"

#include <zeroth/comm/decorators.h>
#include <zeroth/device/device.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using Pending = std::unique_ptr<PendingPoints>;
using Bytes = std::vector<std::uint8_t>;

/// Over NCCL a started message holds up the later ones of its rank: what needs more is not asked of it.
[[nodiscard]] bool goes_alone(const WorldParam& world) {
  return !world.backend.starts_with("nccl");
}

[[nodiscard]] std::vector<WorldParam> worlds_of_started() {
  std::vector<WorldParam> worlds = several_matched_ranks();
  if (started_worlds().empty())
    worlds.insert(worlds.end(), {{"staged", 2}, {"staged", 3}, {"mixed", 3}, {"sockets", 2}});
  std::erase_if(worlds, [](const WorldParam& world) { return !goes_alone(world); });
  return worlds;
}

class StartedPoints : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedPoints, ::testing::ValuesIn(worlds_of_started()), name_of_param);

constexpr std::size_t kLargest = kSanitized ? 700'000 : std::size_t{5} << 20U;
/// 1 B, what lies in a ring, what fills it, and what goes on in pieces or is read where it lies.
constexpr std::size_t kSizes[] = {1, 1'000, 65'536, 65'537, 300'001, kLargest};

[[nodiscard]] std::uint8_t value_of(int from, int to, std::size_t message, std::size_t index) {
  return static_cast<std::uint8_t>(index * 31 + index / 251 + static_cast<std::size_t>(from * 7 + to) + message * 13);
}

[[nodiscard]] Bytes message_of(int from, int to, std::size_t message, std::size_t bytes) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = value_of(from, to, message, i);
  return data;
}

void expect_message(const Bytes& data, int from, int to, std::size_t message) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] == value_of(from, to, message, i)) continue;
    throw std::runtime_error(
        fmt::format("byte {} of {} of message {} from rank {} is wrong", i, data.size(), message, from));
  }
}

[[nodiscard]] MessageTag tag_of(std::size_t message) {
  return {.unit = 1, .label = static_cast<std::uint32_t>(message)};
}

[[nodiscard]] Pending start_send(const Communicator& comm, const Bytes& data, int to, std::size_t message) {
  return comm.start_send(std::span<const std::uint8_t>(data), to, tag_of(message));
}

[[nodiscard]] Pending start_recv(const Communicator& comm, Bytes& data, int from, std::size_t message) {
  return comm.start_recv(std::span<std::uint8_t>(data), from, tag_of(message));
}

void poll(PendingPoints& pending) {
  for (const Deadline deadline(quick_options().timeout); !pending.done(); std::this_thread::yield())
    require(!deadline.passed(), "it was never done");
}

/// Every rank starts sends to both neighbours before anybody receives.
TEST_P(StartedPoints, SendsBeforeAnyReceiveHangNobody) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int next = (rank + 1) % comm.size();
    const int previous = (rank + comm.size() - 1) % comm.size();
    std::vector<Bytes> data;
    std::vector<Pending> sends;
    for (std::size_t message = 0; message < std::size(kSizes); ++message) {
      for (const int to : {next, previous}) {
        data.push_back(message_of(rank, to, message, kSizes[message]));
        sends.push_back(start_send(comm, data.back(), to, message));
      }
    }
    for (std::size_t message = 0; message < std::size(kSizes); ++message) {
      for (const int from : {previous, next}) {
        Bytes in(kSizes[message]);
        if (message % 2 == 0) {
          comm.recv(std::span(in), from, tag_of(message));
        } else {
          const Pending pending = start_recv(comm, in, from, message);
          message % 3 == 0 ? pending->wait() : poll(*pending);
        }
        expect_message(in, from, rank, message);
      }
    }
    for (const Pending& pending : sends) pending->wait();
    for (const Pending& pending : sends) require(pending->done(), "not done after wait()");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(StartedPoints, ManyOfMixedSizesAreUnderWayAtOnceInBothDirections) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    if (rank != 0 && rank != last) return;
    constexpr std::size_t kMessages = 64;
    const int peer = rank == 0 ? last : 0;
    const auto bytes_of = [](std::size_t message) { return message * 997 % 13 * (message % 5 == 0 ? 20'000 : 300); };
    std::vector<Bytes> out;
    std::vector<Bytes> in;
    std::vector<Pending> pending;
    for (std::size_t message = 0; message < kMessages; ++message) {
      out.push_back(message_of(rank, peer, message, bytes_of(message)));
      in.emplace_back(bytes_of(message));
    }
    // One rank receives before it sends; the other one gives both halves together.
    for (std::size_t message = 0; message < kMessages; ++message) {
      if (rank == 0) {
        pending.push_back(start_recv(comm, in[message], peer, message));
      } else {
        const Collective both[] = {
            Communicator::send_call(std::span<const std::uint8_t>(out[message]), peer, tag_of(message)),
            Communicator::recv_call(std::span(in[message]), peer, tag_of(message))};
        pending.push_back(comm.start(both));
      }
    }
    for (std::size_t message = 0; rank == 0 && message < kMessages; ++message)
      pending.push_back(start_send(comm, out[message], peer, message));
    for (std::size_t index = pending.size(); index-- > 0;) pending[index]->wait();  // the last ones first
    for (std::size_t message = 0; message < kMessages; ++message) expect_message(in[message], peer, rank, message);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(StartedPoints, OrderIsThatOfTheProgramWhetherStartedOrNot) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    if (rank != 0 && rank != last) return;
    constexpr std::size_t kMessages = 120;
    const auto bytes_of = [](std::size_t message) { return message % 7 == 0 ? 90'000 + message : message % 5; };
    std::mt19937_64 random(static_cast<std::uint64_t>(rank) + 5);  // each rank starts others
    std::vector<Bytes> data;
    std::vector<Pending> pending;
    for (std::size_t message = 0; message < kMessages; ++message) {
      const bool starts = random() % 2 == 0;
      data.push_back(rank == 0 ? message_of(0, last, message, bytes_of(message)) : Bytes(bytes_of(message)));
      if (rank == 0) {
        if (starts) pending.push_back(start_send(comm, data.back(), last, message));
        if (!starts) comm.send(std::span<const std::uint8_t>(data.back()), last, tag_of(message));
      } else {
        if (starts) pending.push_back(start_recv(comm, data.back(), 0, message));
        if (!starts) comm.recv(std::span(data.back()), 0, tag_of(message));
      }
    }
    for (const Pending& each : pending) each->wait();
    for (std::size_t message = 0; message < kMessages; ++message) expect_message(data[message], 0, last, message);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

class StartedAmongThree : public StartedPoints {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedAmongThree, ::testing::ValuesIn([] {
                           std::vector<WorldParam> worlds = worlds_of_started();
                           std::erase_if(worlds, [](const WorldParam& world) { return world.size < 3; });
                           return worlds;
                         }()),
                         name_of_param);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(StartedAmongThree);  // where somebody has started two ranks

/// Rank 0 owes the second rank a message while it is in a call with the last one, which comes to it only when the
/// second one has got the message; with a message, and with a sum of a part of the ranks.
TEST_P(StartedAmongThree, MessagesGoOnInEveryOtherCallOfTheirRank) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    const bool ends = rank == 0 || rank == last;
    const std::shared_ptr<CommBackend> part = backend->split(ends ? 0 : -1, rank, "ends");
    constexpr std::size_t kBytes = kLargest / 2;
    for (const bool sum : {false, true}) {
      Bytes data = rank == 0 ? message_of(0, 1, 0, kBytes) : Bytes(kBytes);
      std::uint8_t word = 1;
      std::vector<float> sums(70'000, 1.0F);
      const Pending pending = rank == 0   ? start_send(comm, data, 1, 0)
                              : rank == 1 ? start_recv(comm, data, 0, 0)
                                          : nullptr;
      if (rank == 1) {
        pending->wait();
        expect_message(data, 0, 1, 0);
        comm.send(std::span<const std::uint8_t>(&word, 1), last);
      }
      if (rank == last) comm.recv(std::span(&word, 1), 1);
      if (sum && ends) Communicator(part).all_reduce(std::span(sums));
      if (!sum && rank == last) comm.send(std::span<const std::uint8_t>(&word, 1), 0);
      if (!sum && rank == 0) comm.recv(std::span(&word, 1), last);
      if (rank == 0) pending->wait();
      comm.barrier();
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// The same of the receiver: it takes a message while it waits for a sum of all ranks, and for another message.
TEST_P(StartedPoints, ReceivesGoOnInOtherCallsOfTheirRank) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    constexpr std::size_t kBytes = 300'001;
    for (const bool sum : {false, true}) {
      if (rank == 0) std::this_thread::sleep_for(Milliseconds{20});  // the receiver is in that call
      Bytes data = rank == 0 ? message_of(0, 1, 0, kBytes) : Bytes(kBytes);
      std::uint8_t word = 0;
      std::vector<float> sums(70'000, 1.0F);
      const Pending pending = rank == 0   ? start_send(comm, data, 1, 0)
                              : rank == 1 ? start_recv(comm, data, 0, 0)
                                          : nullptr;
      if (rank == 0) pending->wait();
      if (sum) comm.all_reduce(std::span(sums));
      if (!sum && rank == 0 && comm.size() > 2) comm.send(std::span<const std::uint8_t>(&word, 1), 2);
      if (!sum && rank == 2) comm.recv(std::span(&word, 1), 0);
      if (!sum && rank == 2) comm.send(std::span<const std::uint8_t>(&word, 1), 1);
      if (!sum && rank == 1 && comm.size() > 2) comm.recv(std::span(&word, 1), 2);
      if (rank == 1) {
        pending->wait();
        expect_message(data, 0, 1, 0);
      }
      comm.barrier();
    }
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(StartedPoints, CountWhatBlockingOnesCount) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const int last = comm.size() - 1;
    const auto counted = [&](bool starts) {
      const auto table = std::make_shared<TrafficTable>();
      backend->set_observer(table);
      for (const std::size_t bytes : {std::size_t{5}, std::size_t{500'000}}) {
        Bytes data(bytes);
        const Collective call = rank == 0 ? Communicator::send_call(std::span<const std::uint8_t>(data), last)
                                          : Communicator::recv_call(std::span(data), 0);
        if (rank != 0 && rank != last) continue;
        starts ? comm.start({&call, 1})->wait() : comm.batch({&call, 1});
      }
      backend->set_observer(nullptr);
      return std::pair(table->row(CollectiveKind::kSend), table->row(CollectiveKind::kRecv));
    };
    const auto [sent, received] = counted(true);
    require(sent == TrafficRow{.calls = rank == 0 ? 2U : 0U}, "sent");
    require(received.bytes == (rank == last ? 500'005U : 0U), "received");
    require(std::pair(sent, received) == counted(false), "blocking ones count otherwise");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST_P(StartedPoints, OtherCallsAreRefusedAndTheGroupStaysWhole) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(GetParam(), [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    std::vector<float> data(4, 1.0F);
    const Collective barrier{};
    for (const Collective& call : {barrier, Communicator::send_call(std::span<const float>(data), rank),
                                   Communicator::recv_call(std::span(data), comm.size())}) {
      try {
        (void)comm.start({&call, 1});
        require(false, "it was taken: " + describe(call));
      } catch (const Error& error) {
        require(error.code() == ErrorCode::kUsage, error.what());
      }
    }
    const Pending nothing = comm.start({});
    require(nothing->done(), "nothing is done at once");
    nothing->wait();
    comm.all_reduce(std::span(data));
    require(data[0] == static_cast<float>(comm.size()), "the group was harmed");
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Messages of all pairs in random numbers, sizes and order, between sums; where `mode` is chaos, whose tasks run late.
void random_messages(const std::shared_ptr<CommBackend>& backend, std::uint64_t seed, int rounds, ExecutionMode mode) {
  const std::shared_ptr<CommBackend> faulty =
      std::make_shared<FaultyBackend>(backend->split(0, backend->rank(), fmt::format("seed{}", seed)),
                                      FaultPlan{.seed = seed, .delay_probability = 0.1});
  const auto device = make_cpu_device(mode, seed * 10 + static_cast<std::uint64_t>(backend->rank()));
  const Communicator comm(faulty, device->make_stream("messages"));
  const int rank = comm.rank();
  std::mt19937_64 random(seed);                                       // the same on every rank
  std::mt19937_64 own(seed * 31 + static_cast<std::uint64_t>(rank));  // and each one's
  std::vector<std::vector<std::size_t>> numbers(static_cast<std::size_t>(comm.size()),
                                                std::vector<std::size_t>(static_cast<std::size_t>(comm.size())));
  struct Message {
    Bytes data;
    int from;
    std::size_t number;
    Pending pending;
  };
  std::vector<std::unique_ptr<Message>> under_way;
  const auto finish = [&](std::size_t index) {
    Message& message = *under_way[index];
    if (own() % 2 == 0) message.pending->wait();
    poll(*message.pending);
    if (message.from != rank) expect_message(message.data, message.from, rank, message.number);
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(index));
  };
  for (int round = 0; round < rounds; ++round) {
    const auto from = static_cast<int>(random() % static_cast<std::uint64_t>(comm.size()));
    const auto to = static_cast<int>(random() % static_cast<std::uint64_t>(comm.size()));
    const std::size_t bytes = random() % (random() % 4 == 0 ? 200'000 : 300);
    if (random() % 12 == 0) {
      std::vector<std::int64_t> sum(random() % 4'000, rank);
      comm.all_reduce(std::span(sum));
      for (const std::int64_t value : sum) require(value == comm.size() * (comm.size() - 1) / 2, "a sum between");
    }
    if (from == to) continue;
    const std::size_t number = numbers[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)]++;
    if (rank != from && rank != to) continue;
    auto message = std::make_unique<Message>(Message{{}, from, number, nullptr});
    message->data = rank == from ? message_of(from, to, number, bytes) : Bytes(bytes);
    message->pending =
        rank == from ? start_send(comm, message->data, to, number) : start_recv(comm, message->data, from, number);
    under_way.push_back(std::move(message));
    if (own() % 3 == 0) (void)under_way[own() % under_way.size()]->pending->done();
    // A receive may be waited for, its send has been started: not a send.
    const std::size_t chosen = own() % under_way.size();
    if (own() % 4 == 0 && under_way[chosen]->from != rank) finish(chosen);
  }
  while (!under_way.empty()) finish(own() % under_way.size());
}

class StartedChaos : public StartedPoints {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedChaos, ::testing::ValuesIn(one_world_a_backend(worlds_of_started())),
                         name_of_param);
INSTANTIATE_TEST_SUITE_P(Long, StartedChaos, ::testing::ValuesIn(worlds_of_started()), name_of_param);

TEST_P(StartedChaos, SeedsOfMessagesBetweenAllRanks) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const ExecutionMode mode = is_gpu_world(GetParam().backend) ? ExecutionMode::kInline : ExecutionMode::kChaos;
  const std::uint64_t seeds = in_long_tier() ? 150 : kSanitized ? 4 : 8;
  const RankReport report = run_world(GetParam(), [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    for (std::uint64_t seed = 0; seed < seeds; ++seed) random_messages(backend, seed, 60, mode);
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

/// Of processes that can read each other's memory.
TEST(PassiveSends, AreTakenWhileTheirRankComputes) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const RankReport report = run_world({"shm", 2}, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const Communicator comm(backend);
    const Arena arena = Arena::create(ArenaKind::kShared, kPageBytes, "test");
    const PeerWindow window = backend->attach(arena, "test");
    std::atomic_ref<std::uint32_t> taken(*reinterpret_cast<std::uint32_t*>(window.ranks[1].data()));
    // Large ones, and more small ones than the way between two ranks holds.
    std::vector<std::size_t> sizes{4 << 20U, 4 << 20U, 65'537, 65'536, 300};
    sizes.insert(sizes.end(), 30, 30'000);
    std::vector<Bytes> data;
    std::vector<Pending> pending;
    if (rank == 0) {
      for (std::size_t message = 0; message < sizes.size(); ++message) {
        data.push_back(message_of(0, 1, message, sizes[message]));
        pending.push_back(start_send(comm, data.back(), 1, message));
      }
      comm.barrier();
      for (const Deadline deadline(quick_options().timeout); taken.load() == 0;)  // no call of any group
        require(!deadline.passed(), "the messages were not taken without a look of their sender");
      for (const Pending& each : pending) require(each->done(), "a message that was taken is not done");
    } else {
      comm.barrier();
      for (std::size_t message = 0; message < sizes.size(); ++message) {
        Bytes in(sizes[message]);
        comm.recv(std::span(in), 0, tag_of(message));
        expect_message(in, 0, 1, message);
      }
      taken.store(1);
    }
    comm.barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
