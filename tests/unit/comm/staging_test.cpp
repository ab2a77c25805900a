// Calls with memory of a device over transports of the host, on a fake of CUDA whose copies are late.
#include "comm/decorators/staging_backend.h"
#include "device/cuda/cuda_device.h"
#include "support/error_of.h"
#include "support/fake_gpu.h"
#include "support/thread_groups.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/device/device.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;
using test::FakeGpu;
using test::ThreadTransport;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kRanks = 4;

struct StagedRank {
  int rank = 0;
  int device_number = 0;
  FakeGpu& gpu;
  Stream stream;  ///< of the device
  std::shared_ptr<MemoryLedger> ledger;
  std::unique_ptr<CommBackend> group;

  [[nodiscard]] std::byte* put(const std::vector<std::byte>& bytes) const {
    std::byte* const data = gpu.allocate(device_number, bytes.size() + 1);  // one more: no bytes have an address, too
    std::copy(bytes.begin(), bytes.end(), data);
    return data;
  }
};

struct StagedWorld {
  explicit StagedWorld(ThreadTransport over = ThreadTransport::kMemory, int devices = kRanks)
      : gpu(devices),
        cuda(gpu.cuda_table()),
        one_device(devices == 1),
        groups(kRanks, over, test::nodes_of_ranks(kRanks, over == ThreadTransport::kLevels ? 2 : 0)) {
    options.timeout = Milliseconds{20'000};
  }

  FakeGpu gpu;
  detail::CudaTable cuda;
  bool one_device;
  test::ThreadGroups groups;
  CommOptions options{};
  Milliseconds timeout_of_rank_1{20'000};

  /// What each rank threw, "" for nothing.
  std::vector<std::string> try_ranks(const std::function<void(StagedRank&)>& body) {
    std::vector<std::string> errors(kRanks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          CommOptions own = options;
          own.device = one_device ? 0 : rank;
          if (rank == 1) own.timeout = timeout_of_rank_1;
          const std::shared_ptr<MemoryLedger> ledger = MemoryLedger::create();
          std::unique_ptr<CommBackend> base = groups.group(rank, own);
          own.ledger = ledger;
          const auto device = detail::make_cuda_device(cuda, own.device, own.timeout);
          StagedRank staged{.rank = rank,
                            .device_number = own.device,
                            .gpu = gpu,
                            .stream = device->make_stream("test"),
                            .ledger = ledger,
                            .group = detail::make_staging_backend(std::move(base), own,
                                                                  [&]() -> const detail::CudaTable& { return cuda; })};
          body(staged);
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
};

/// A call, and where its two buffers lie in one piece of memory.
struct Drawn {
  Collective call;
  std::size_t send_offset = 0;
  std::size_t recv_offset = 0;
  std::size_t bytes = 0;

  [[nodiscard]] Collective in(std::byte* memory) const {
    Collective placed = call;
    placed.send = memory + send_offset;
    placed.recv = memory + recv_offset;
    return placed;
  }
};

/// The same on all ranks, but for places: a call of any kind, in place where it can be.
Drawn draw(std::mt19937& random, int rank) {
  constexpr CollectiveKind kKinds[] = {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter,
                                       CollectiveKind::kAllReduce, CollectiveKind::kBroadcast,
                                       CollectiveKind::kGather,    CollectiveKind::kScatter,
                                       CollectiveKind::kAllToAll,  CollectiveKind::kBarrier};
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  Drawn drawn;
  Collective& call = drawn.call;
  call.kind = kKinds[pick(8)];
  if (call.kind == CollectiveKind::kBarrier) return drawn;
  const bool reduces = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  call.in_dtype = call.out_dtype =
      std::vector{DType::kFloat32, DType::kBFloat16, DType::kInt64}[static_cast<std::size_t>(pick(3))];
  const bool one = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kBroadcast;
  for (int part = 0; part < (one ? 1 : kRanks); ++part) call.counts.push_back(pick(4) == 0 ? 0 : pick(500));
  call.root = pick(kRanks);
  const int op = pick(3);
  if (reduces) call.op = static_cast<ReduceOp>(op);
  const bool in_place = pick(2) == 0 && call.kind != CollectiveKind::kAllToAll;
  const bool adds =
      pick(2) == 0 && call.kind == CollectiveKind::kReduceScatter && call.op == ReduceOp::kSum && !in_place;
  const bool widens = pick(2) == 0 && adds && call.in_dtype == DType::kBFloat16;
  call.accumulate = adds;
  if (widens) call.out_dtype = DType::kFloat32;
  if (call.kind == CollectiveKind::kAllToAll) {
    const std::vector<std::int64_t> from_zero = call.counts;  // rank r gives rank p what rank 0 gives rank (p - r)
    for (int peer = 0; peer < kRanks; ++peer) {
      call.counts[static_cast<std::size_t>(peer)] =
          from_zero[static_cast<std::size_t>((peer - rank + kRanks) % kRanks)];
      call.recv_counts.push_back(from_zero[static_cast<std::size_t>((rank - peer + kRanks) % kRanks)]);
    }
  }
  const CallExtent extent = extent_of(call, rank);
  const auto send = static_cast<std::size_t>(extent.send) * size_of(call.in_dtype);
  const auto recv = static_cast<std::size_t>(extent.recv) * size_of(call.out_dtype);
  const auto before = static_cast<std::size_t>(
                          one ? 0 : std::accumulate(call.counts.begin(), call.counts.begin() + rank, std::int64_t{0})) *
                      size_of(call.in_dtype);
  if (in_place && send > 0 && recv > 0) {
    const bool gathers = call.kind == CollectiveKind::kAllGather || call.kind == CollectiveKind::kGather;
    (gathers ? drawn.send_offset : drawn.recv_offset) = before;
    drawn.bytes = std::max(drawn.send_offset + send, drawn.recv_offset + recv);
  } else {
    drawn.recv_offset = align_up(send, 64);
    drawn.bytes = drawn.recv_offset + recv;
  }
  return drawn;
}

class StagedOver : public ::testing::TestWithParam<std::pair<ThreadTransport, int>> {};

std::string name_of_case(const ::testing::TestParamInfo<std::pair<ThreadTransport, int>>& info) {
  const std::vector<std::string> names{"memory", "messages", "levels", "mixed"};
  return names[static_cast<std::size_t>(info.param.first)] + (info.param.second == 1 ? "_one_gpu" : "_a_gpu_each");
}

INSTANTIATE_TEST_SUITE_P(Transports, StagedOver,
                         ::testing::Values(std::pair(ThreadTransport::kMemory, kRanks),
                                           std::pair(ThreadTransport::kMemory, 1),
                                           std::pair(ThreadTransport::kMessages, kRanks),
                                           std::pair(ThreadTransport::kLevels, 1),
                                           std::pair(ThreadTransport::kMixed, kRanks)),
                         name_of_case);

/// The bits of the same call on memory of the host, in and beside the buffers; ranks may share a GPU.
TEST_P(StagedOver, EveryCallHasTheBitsOfTheHost) {
  StagedWorld world(GetParam().first, GetParam().second);
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    std::mt19937 shared(7);
    std::mt19937 own(static_cast<unsigned>(rank.rank) + 100);
    const Stream host = make_cpu_device()->make_stream("host");
    for (int round = 0; round < 150; ++round) {
      const Drawn drawn = draw(shared, rank.rank);
      std::vector<std::byte> expected(drawn.bytes);
      for (std::byte& byte : expected) byte = static_cast<std::byte>(own() % 64);  // no NaN in any dtype
      std::byte* const on_device = rank.put(expected);
      const std::vector<Collective> calls{drawn.in(expected.data())};
      const std::vector<Collective> same{drawn.in(on_device)};
      rank.group->submit(calls, host).wait();
      rank.group->submit(same, rank.stream).wait();
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), on_device))
          << "round " << round << ": " << describe(drawn.call);
    }
  }),
              Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST_P(StagedOver, MessagesGoAroundARing) {
  StagedWorld world(GetParam().first, GetParam().second);
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    const int next = (rank.rank + 1) % kRanks;
    const int before = (rank.rank + kRanks - 1) % kRanks;
    for (const std::int64_t bytes : {0, 3, 5'000, 300'000}) {
      const auto size = static_cast<std::size_t>(bytes);
      std::byte* const sent = rank.put(std::vector<std::byte>(size, static_cast<std::byte>(rank.rank + 1)));
      std::byte* const got = rank.put(std::vector<std::byte>(size));
      const std::vector<Collective> ring{
          {.kind = CollectiveKind::kSend, .send = sent, .counts = {bytes}, .root = next},
          {.kind = CollectiveKind::kRecv, .recv = got, .counts = {bytes}, .root = before}};
      rank.group->submit(ring, rank.stream).wait();
      EXPECT_EQ(std::vector<std::byte>(got, got + size),
                std::vector<std::byte>(size, static_cast<std::byte>(before + 1)));
    }
  }),
              Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

/// Every rank starts all its sends before anybody receives; what is on the way to the device is in no other's place.
TEST_P(StagedOver, StartedMessagesComeAfterWhatTheStreamHoldsAndAreOnTheDeviceWhenTheyAreDone) {
  StagedWorld world(GetParam().first, GetParam().second);
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    const int next = (rank.rank + 1) % kRanks;
    const int before = (rank.rank + kRanks - 1) % kRanks;
    constexpr std::int64_t kSizes[] = {300'000, 5'000, 0, 200'000};
    std::vector<std::unique_ptr<PendingPoints>> sends;
    std::vector<std::unique_ptr<PendingPoints>> recvs;
    std::vector<std::byte*> got;
    for (const std::int64_t bytes : kSizes) {
      const auto size = static_cast<std::size_t>(bytes);
      std::byte* const sent = rank.put(std::vector<std::byte>(size));
      const auto value = static_cast<std::byte>(10 * (rank.rank + 1) + static_cast<int>(sends.size()));
      rank.gpu.enqueue(rank.stream.native(), [=] { std::fill(sent, sent + size, value); });
      const Collective send{.kind = CollectiveKind::kSend, .send = sent, .counts = {bytes}, .root = next};
      sends.push_back(rank.group->start({&send, 1}, rank.stream));
      rank.gpu.enqueue(rank.stream.native(), [=] { std::fill(sent, sent + size, std::byte{99}); });  // it is taken
    }
    for (const std::int64_t bytes : kSizes) {
      got.push_back(rank.put(std::vector<std::byte>(static_cast<std::size_t>(bytes))));
      const Collective recv{.kind = CollectiveKind::kRecv, .recv = got.back(), .counts = {bytes}, .root = before};
      recvs.push_back(rank.group->start({&recv, 1}, rank.stream));
    }
    for (std::size_t index = 0; index < recvs.size(); ++index) {
      if (index % 2 == 0) recvs[index]->wait();
      while (!recvs[index]->done()) std::this_thread::yield();
      const auto size = static_cast<std::size_t>(kSizes[index]);
      const auto value = static_cast<std::byte>(10 * (before + 1) + static_cast<int>(index));
      EXPECT_EQ(std::vector<std::byte>(got[index], got[index] + size), std::vector<std::byte>(size, value)) << index;
    }
    for (const auto& send : sends) send->wait();
  }),
              Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

Collective sum_of(std::byte* data, std::int64_t count) {
  return {.kind = CollectiveKind::kAllReduce,
          .in_dtype = DType::kFloat32,
          .out_dtype = DType::kFloat32,
          .send = data,
          .recv = data,
          .counts = {count}};
}

TEST(Staging, ComesAfterWhatTheStreamHoldsAndBeforeWhatItGets) {
  StagedWorld world;
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    auto* const data = reinterpret_cast<float*>(rank.put(std::vector<std::byte>(8)));
    float seen = 0;
    rank.gpu.enqueue(rank.stream.native(), [=] { data[0] = 1; });
    // Two calls of one submit(): the second takes what the first gave.
    const std::vector<Collective> twice(2, sum_of(reinterpret_cast<std::byte*>(data), 2));
    const Work work = rank.group->submit(twice, rank.stream);
    rank.gpu.enqueue(rank.stream.native(), [=, &seen] { seen = data[0] + 1; });
    rank.stream.synchronize();
    EXPECT_EQ(seen, kRanks * kRanks + 1);
    EXPECT_NO_THROW(work.wait());
  }),
              Each(IsEmpty()));
}

TEST(Staging, FollowsCallsOfTheHostThatWereSubmittedBefore) {
  StagedWorld world(ThreadTransport::kMessages);
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    const auto chaos = make_cpu_device(ExecutionMode::kChaos, static_cast<std::uint64_t>(rank.rank));
    const Stream late = chaos->make_stream("late");
    std::vector<float> first(16, 1);
    const Collective on_host = sum_of(reinterpret_cast<std::byte*>(first.data()), 16);
    const Collective on_device = sum_of(rank.put(std::vector<std::byte>(8)), 2);
    const Work early = rank.group->submit({&on_host, 1}, late);
    rank.group->submit({&on_device, 1}, rank.stream).wait();  // of other counts: a rank in the wrong call would be told
    early.wait();
    EXPECT_EQ(first.front(), kRanks);
  }),
              Each(IsEmpty()));
}

TEST(Staging, PartsOfAGroupShareItsMemoryWhichIsCounted) {
  StagedWorld world;
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    EXPECT_EQ(rank.ledger->live().total(), 0U) << "nothing before the first call on a device";
    const std::unique_ptr<CommBackend> pair = rank.group->split(rank.rank / 2, rank.rank, "pair");
    auto* const data = reinterpret_cast<float*>(rank.put(std::vector<std::byte>(4'096)));
    data[0] = 1;
    const Collective small = sum_of(reinterpret_cast<std::byte*>(data), 64);
    pair->submit({&small, 1}, rank.stream).wait();
    EXPECT_EQ(data[0], 2);
    EXPECT_EQ(rank.ledger->live()[MemoryState::kControl], 256U);
    const Collective large = sum_of(reinterpret_cast<std::byte*>(data), 1'024);
    rank.group->submit({&large, 1}, rank.stream).wait();
    EXPECT_EQ(data[0], 8);
    EXPECT_EQ(rank.ledger->live()[MemoryState::kControl], 4'096U) << "as large as the largest call";
    EXPECT_EQ(rank.group->split(-1, 0, "none"), nullptr);
    rank.group.reset();
    EXPECT_EQ(rank.ledger->live().total(), 4'096U) << "the part has it, too";
  }),
              Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Staging, RefusesBuffersThatAStreamCannotReach) {
  StagedWorld world;
  EXPECT_THAT(world.try_ranks([&](StagedRank& rank) {
    std::vector<std::byte> of_host(8);
    const Collective wrong = sum_of(of_host.data(), 2);
    EXPECT_THAT(
        error_of(ErrorCode::kUsage, [&] { (void)rank.group->submit({&wrong, 1}, rank.stream); }),
        AllOf(HasSubstr("a buffer on a CUDA stream is memory of the host; where: comm.inproc group=world; who: rank"),
              HasSubstr("send of all_reduce")));
    const Collective foreign = sum_of(rank.gpu.allocate((rank.rank + 1) % kRanks, 8), 2);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)rank.group->submit({&foreign, 1}, rank.stream); }),
                HasSubstr("a buffer is on another device"));
    const Stream host = make_cpu_device()->make_stream("host");
    const Collective lost = sum_of(rank.put(of_host), 2);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)rank.group->submit({&lost, 1}, host); }),
                HasSubstr("a buffer on a stream of the host is memory of a device"));
    const auto device = detail::make_cuda_device(world.cuda, rank.rank, Milliseconds{1'000});
    const Arena arena = device->make_arena(ArenaKind::kDevice, 64, "weights");
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)rank.group->attach(arena, "weights"); }),
                AllOf(HasSubstr("arena"), HasSubstr("weights")));
    // Nothing of it has reached the others.
    Communicator(std::shared_ptr<CommBackend>(std::move(rank.group))).barrier();
  }),
              Each(IsEmpty()));
}

TEST(Staging, ADeviceThatIsNotThereIsNamed) {
  StagedWorld world(ThreadTransport::kMemory, kRanks);
  world.gpu.count_status = detail::kCudaNoDevice;
  CommOptions options;
  auto group = detail::make_staging_backend(make_backend("self", {}), options,
                                            [&]() -> const detail::CudaTable& { return world.cuda; });
  world.gpu.count_status = detail::kCudaSuccess;
  const auto device = detail::make_cuda_device(world.cuda, 0, Milliseconds{1'000});
  world.gpu.count_status = detail::kCudaNoDevice;
  const Collective barrier;
  EXPECT_THAT(error_of(ErrorCode::kEnvironment, [&] { (void)group->submit({&barrier, 1}, device->make_stream("s")); }),
              HasSubstr("where: comm.self group=world"));
}

/// What only one rank can know: the others hear it at once.
TEST(Staging, ABrokenDeviceEndsTheJobForAll) {
  StagedWorld world;
  const std::vector<std::string> errors = world.try_ranks([&](StagedRank& rank) {
    const Collective call = sum_of(rank.put(std::vector<std::byte>(8)), 2);
    rank.group->submit({&call, 1}, rank.stream).wait();
    const Collective barrier;
    rank.group->submit({&barrier, 1}, rank.stream).wait();
    if (rank.rank == 2) rank.gpu.broken_device = 2;
    rank.group->submit({&call, 1}, rank.stream).wait();
  });
  EXPECT_THAT(errors[2], AllOf(HasSubstr("[RESOURCE]"), HasSubstr("an illegal memory access")));
  for (const int rank : {0, 1, 3})
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)], HasSubstr("[ABORTED] rank 2 stopped the job: [RESOURCE] CUDA"));
}

TEST(Staging, AStreamThatNeverComesToTheCallIsATimeout) {
  StagedWorld world;
  world.timeout_of_rank_1 = Milliseconds{400};
  const std::vector<std::string> errors = world.try_ranks([&](StagedRank& rank) {
    const Collective call = sum_of(rank.put(std::vector<std::byte>(8)), 2);
    if (rank.rank == 1) rank.gpu.hold(rank.stream.native(), true);
    rank.group->submit({&call, 1}, rank.stream).wait();
  });
  EXPECT_THAT(errors[1], AllOf(HasSubstr("[TIMEOUT] the device did not come to the call within 0.4 s"),
                               HasSubstr("which: all_reduce float32 [2]")));
  for (const int rank : {0, 2, 3})
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                AllOf(HasSubstr("[TIMEOUT] the device did not come"), HasSubstr("who: rank 1/4")));
}

/// Also what a backend of a mixture, or of a transport of messages, hears that makes no call meanwhile.
TEST(Staging, WhoWaitsForItsDeviceHearsThatTheJobIsOver) {
  for (const ThreadTransport over : {ThreadTransport::kMemory, ThreadTransport::kLevels, ThreadTransport::kMixed}) {
    const auto begin = SteadyClock::now();
    StagedWorld world(over);
    const std::vector<std::string> errors = world.try_ranks([&](StagedRank& rank) {
      const Collective call = sum_of(rank.put(std::vector<std::byte>(8)), 2);
      rank.group->submit({&call, 1}, rank.stream).wait();
      if (rank.rank == 2) rank.group->abort(Error(ErrorCode::kModel, "planted"));
      rank.gpu.hold(rank.stream.native(), true);
      rank.group->submit({&call, 1}, rank.stream).wait();
    });
    EXPECT_LT(SteadyClock::now() - begin, Milliseconds{10'000});
    EXPECT_THAT(errors, Each(HasSubstr("planted"))) << static_cast<int>(over);
  }
}

TEST(Staging, WhoWaitsForItsDeviceSeesThatARankHasLeft) {
  for (const ThreadTransport over : {ThreadTransport::kMemory, ThreadTransport::kMixed}) {
    StagedWorld world(over);
    const std::vector<std::string> errors = world.try_ranks([&](StagedRank& rank) {
      const Collective call = sum_of(rank.put(std::vector<std::byte>(8)), 2);
      rank.group->submit({&call, 1}, rank.stream).wait();
      if (rank.rank == 2) return;
      rank.gpu.hold(rank.stream.native(), true);
      rank.group->submit({&call, 1}, rank.stream).wait();
    });
    for (const int rank : {0, 1, 3})
      EXPECT_THAT(errors[static_cast<std::size_t>(rank)], HasSubstr("[PEER_LOST]")) << static_cast<int>(over);
  }
}

TEST(Staging, WhatTheHostFindsIsInTheWork) {
  StagedWorld world;
  const std::vector<std::string> errors = world.try_ranks([&](StagedRank& rank) {
    const Collective call = sum_of(rank.put(std::vector<std::byte>(16)), rank.rank == 0 ? 3 : 2);
    const Work work = rank.group->submit({&call, 1}, rank.stream);  // does not throw
    work.wait();
  });
  EXPECT_THAT(errors, AllOf(SizeIs(kRanks), Each(HasSubstr("all_reduce"))));
  EXPECT_THAT(errors, ::testing::Contains(HasSubstr("[MISMATCH]")));
}

}  // namespace
}  // namespace zeroth
