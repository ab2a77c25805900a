// What the backend over NCCL gives to NCCL and CUDA, on fakes of both that move data; nccl_trouble_test.cpp has what
// goes wrong.
#include "comm/nccl/nccl_calls.h"
#include "support/error_of.h"
#include "support/nccl_ranks.h"

#include <zeroth/base/dtype.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::NcclRank;
using test::NcclWorld;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<std::string> kNcclCalls = {"all_", "reduce", "broadcast", "send", "recv", "group", "copy"};

std::vector<float> numbers(int rank, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(100 * (rank + 1)) + static_cast<float>(i);
  return values;
}

template <class T>
std::vector<T> read(const T* data, std::size_t count) {
  return {data, data + count};
}

/// Runs on worlds of 1, 2 and 3 ranks, with and without comparisons before each call; nothing may go wrong, and nothing
/// be left.
void on_worlds(const std::function<void(NcclRank&, int size)>& body,
               const std::function<void(NcclWorld&)>& change = {}) {
  for (const int size : {1, 2, 3}) {
    for (const bool check_calls : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + " ranks" + (check_calls ? ", compared" : ""));
      NcclWorld world(size);
      world.options.check_calls = check_calls;
      if (change) change(world);
      EXPECT_THAT(world.try_ranks([&](NcclRank& rank) { body(rank, size); }), Each(IsEmpty()));
      EXPECT_THAT(world.gpu.violations(), IsEmpty());
      EXPECT_EQ(world.gpu.living_comms(), 0U);
      EXPECT_EQ(world.gpu.living_streams(), 0U);
      EXPECT_EQ(world.gpu.living_events(), 0U);
    }
  }
}

void run(NcclRank& rank, const Collective& call) {
  rank.group->submit({&call, 1}, rank.stream).wait();
}

Collective call_of(CollectiveKind kind, const float* send, float* recv, std::vector<std::int64_t> counts,
                   int root = 0) {
  return {.kind = kind,
          .in_dtype = DType::kFloat32,
          .out_dtype = DType::kFloat32,
          .send = reinterpret_cast<const std::byte*>(send),
          .recv = reinterpret_cast<std::byte*>(recv),
          .counts = std::move(counts),
          .root = root};
}

/// A count for each rank, one of them 0: 3, 0, 7.
std::vector<std::int64_t> uneven(int size) {
  const std::vector<std::int64_t> all{3, 0, 7};
  return {all.begin(), all.begin() + size};
}

TEST(Nccl, SaysWhatItIs) {
  CommOptions options;
  on_worlds(
      [&](NcclRank& rank, int size) {
        EXPECT_EQ(rank.group->kind(), "nccl");
        EXPECT_EQ(rank.group->rank(), rank.rank);
        EXPECT_EQ(rank.group->size(), size);
        EXPECT_EQ(rank.group->group_name(), "world");
        EXPECT_EQ(rank.group->memory_bytes(), transport_bytes("nccl", size, options));
      },
      [&](const NcclWorld& world) { options = world.options; });
  EXPECT_GT(transport_bytes("nccl", 2, options), transport_bytes("nccl", 2, {}))
      << "the comparisons have a group of the base";
}

class NcclMemory : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Checks, NcclMemory, ::testing::Bool());

TEST_P(NcclMemory, IsPlannedAndCounted) {
  NcclWorld world(2);
  world.options.check_calls = GetParam();
  const std::vector<std::shared_ptr<MemoryLedger>> ledgers{MemoryLedger::create(), MemoryLedger::create()};
  world.set_options = [&](int rank, CommOptions& options) { options.ledger = ledgers[static_cast<std::size_t>(rank)]; };
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    const auto counted = [&] { return ledgers[static_cast<std::size_t>(rank.rank)]->live()[MemoryState::kControl]; };
    EXPECT_EQ(counted(), rank.group->memory_bytes());
    const auto part = rank.group->split(0, 0, "part");
    EXPECT_EQ(counted(), rank.group->memory_bytes() + part->memory_bytes());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  for (const auto& ledger : ledgers) EXPECT_EQ(ledger->live().total(), 0U);
}

TEST(Nccl, AllGatherOfEqualAndUnevenParts) {
  on_worlds([](NcclRank& rank, int size) {
    for (const auto& counts : {std::vector<std::int64_t>(static_cast<std::size_t>(size), 5), uneven(size)}) {
      const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
      const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank.rank)]);
      std::vector<float> expected;
      for (int peer = 0; peer < size; ++peer) {
        const auto part = numbers(peer, static_cast<std::size_t>(counts[static_cast<std::size_t>(peer)]));
        expected.insert(expected.end(), part.begin(), part.end());
      }
      float* const whole = rank.room<float>(total);
      run(rank, call_of(CollectiveKind::kAllGather, rank.put(numbers(rank.rank, own)), whole, counts));
      EXPECT_EQ(read(whole, total), expected);
      // And in place.
      float* const second = rank.room<float>(total);
      const auto before = std::accumulate(counts.begin(), counts.begin() + rank.rank, std::int64_t{0});
      const auto mine = numbers(rank.rank, own);
      std::copy(mine.begin(), mine.end(), second + before);
      run(rank, call_of(CollectiveKind::kAllGather, second + before, second, counts));
      EXPECT_EQ(read(second, total), expected);
    }
  });
}

TEST(Nccl, ReduceScatterOfEqualUnevenAndMovedParts) {
  on_worlds([](NcclRank& rank, int size) {
    for (const bool even : {true, false}) {
      for (const bool moved : {false, true}) {
        const auto counts = even ? std::vector<std::int64_t>(static_cast<std::size_t>(size), 4) : uneven(size);
        const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
        std::vector<std::int64_t> offsets(static_cast<std::size_t>(size));
        std::int64_t end = 0;
        for (int part = 0; part < size; ++part) {
          const auto index = static_cast<std::size_t>(moved ? size - 1 - part : part);
          offsets[index] = end;
          end += counts[index];
        }
        Collective call = call_of(CollectiveKind::kReduceScatter, rank.put(numbers(rank.rank, total)), nullptr, counts);
        const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank.rank)]);
        auto* const part = rank.room<float>(own + 1);
        call.recv = reinterpret_cast<std::byte*>(part);
        if (moved) call.offsets = offsets;
        run(rank, call);
        for (std::size_t i = 0; i < own; ++i) {
          float expected = 0;
          for (int peer = 0; peer < size; ++peer) {
            expected +=
                numbers(peer, total)[static_cast<std::size_t>(offsets[static_cast<std::size_t>(rank.rank)]) + i];
          }
          EXPECT_EQ(part[i], expected) << i << (even ? " even" : " uneven") << (moved ? " moved" : "");
        }
      }
    }
  });
}

TEST(Nccl, AllReduceOfEveryDtypeAndOperation) {
  on_worlds([](NcclRank& rank, int size) {
    const auto check = [&](auto example, bool sums) {
      using T = decltype(example);
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        if (op == ReduceOp::kSum && !sums) continue;
        T* const data = rank.put(std::vector<T>(9, static_cast<T>(static_cast<float>(rank.rank + 1))));
        const Collective call{.kind = CollectiveKind::kAllReduce,
                              .in_dtype = DTypeOf<T>::value,
                              .out_dtype = DTypeOf<T>::value,
                              .send = reinterpret_cast<const std::byte*>(data),
                              .recv = reinterpret_cast<std::byte*>(data),
                              .counts = {9},
                              .op = op};
        run(rank, call);
        const int expected = op == ReduceOp::kSum ? size * (size + 1) / 2 : op == ReduceOp::kMin ? 1 : size;
        EXPECT_EQ(static_cast<float>(data[8]), static_cast<float>(expected))
            << name_of(DTypeOf<T>::value) << " " << name_of(op);
      }
    };
    check(double{}, true);
    check(float{}, true);
    check(BFloat16{}, true);
    check(Float16{}, true);
    check(std::int64_t{}, true);
    check(std::int32_t{}, true);
    check(std::uint8_t{}, false);
  });
}

TEST(Nccl, BroadcastGatherAndScatter) {
  on_worlds([](NcclRank& rank, int size) {
    for (int root = 0; root < size; ++root) {
      const bool is_root = rank.rank == root;
      float* const data = rank.put(numbers(rank.rank, 6));
      run(rank, call_of(CollectiveKind::kBroadcast, is_root ? data : nullptr, data, {6}, root));
      EXPECT_EQ(read(data, 6), numbers(root, 6));

      const auto counts = uneven(size);
      const auto total = static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
      const auto own = static_cast<std::size_t>(counts[static_cast<std::size_t>(rank.rank)]);
      float* const whole = rank.room<float>(total + 1);
      float* const part = rank.put(numbers(rank.rank, own + 1));
      run(rank, call_of(CollectiveKind::kGather, part, is_root ? whole : nullptr, counts, root));
      std::vector<float> expected;
      for (int peer = 0; peer < size; ++peer) {
        const auto theirs = numbers(peer, static_cast<std::size_t>(counts[static_cast<std::size_t>(peer)]));
        expected.insert(expected.end(), theirs.begin(), theirs.end());
      }
      if (is_root) {
        EXPECT_EQ(read(whole, total), expected);
      }
      float* const back = rank.room<float>(own + 1);
      run(rank, call_of(CollectiveKind::kScatter, is_root ? whole : nullptr, back, counts, root));
      EXPECT_EQ(read(back, own), numbers(rank.rank, own));
    }
  });
}

TEST(Nccl, AllToAllMovesPartsOfAnySize) {
  on_worlds([](NcclRank& rank, int size) {
    // Rank r gives 1 + 2 r + to elements to rank `to`, but rank 0 gives itself none.
    const auto given = [](int from, int to) {
      return from == 0 && to == 0 ? std::int64_t{0} : std::int64_t{1} + 2 * from + to;
    };
    Collective call = call_of(CollectiveKind::kAllToAll, nullptr, nullptr, {});
    std::vector<float> send;
    std::vector<float> expected;
    for (int peer = 0; peer < size; ++peer) {
      call.counts.push_back(given(rank.rank, peer));
      call.recv_counts.push_back(given(peer, rank.rank));
      for (std::int64_t i = 0; i < call.counts.back(); ++i)
        send.push_back(static_cast<float>(1000 * rank.rank + 10 * peer + i));
      for (std::int64_t i = 0; i < call.recv_counts.back(); ++i)
        expected.push_back(static_cast<float>(1000 * peer + 10 * rank.rank + i));
    }
    float* const recv = rank.room<float>(expected.size() + 1);
    call.send = reinterpret_cast<const std::byte*>(rank.put(send));
    call.recv = reinterpret_cast<std::byte*>(recv);
    run(rank, call);
    EXPECT_EQ(read(recv, expected.size()), expected);
  });
}

TEST(Nccl, SendsAndReceivesOfOneSubmitAreOneGroup) {
  NcclWorld world(3);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const int next = (rank.rank + 1) % 3;
    const int before = (rank.rank + 2) % 3;
    float* const to = rank.put(numbers(rank.rank, 5));
    float* const from = rank.room<float>(5);
    const std::vector<Collective> calls{Communicator::send_call(std::span<const float>(to, 5), next),
                                        Communicator::recv_call(std::span<float>(from, 5), before)};
    rank.group->submit(calls, rank.stream).wait();
    EXPECT_EQ(read(from, 5), numbers(before, 5));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(1, kNcclCalls),
              ElementsAre("group_start", "send 5 float32 peer=2 s0", "recv 5 float32 peer=0 s0", "group_end"));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, AStartIsOneGroupThatNobodyWaitsForUntilItIsAskedFor) {
  NcclWorld world(3);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const int next = (rank.rank + 1) % 3;
    const int before = (rank.rank + 2) % 3;
    float* const to = rank.put(numbers(rank.rank, 5));
    float* const from = rank.room<float>(5);
    const std::vector<Collective> calls{Communicator::send_call(std::span<const float>(to, 5), next),
                                        Communicator::recv_call(std::span<float>(from, 5), before)};
    void* const native = rank.stream.native();
    rank.gpu.hold(native, true);  // as where its stream still computes
    const std::unique_ptr<PendingPoints> pending = rank.group->start(calls, rank.stream);
    EXPECT_FALSE(pending->done());
    rank.gpu.hold(native, false);
    if (rank.rank == 0) {
      while (!pending->done()) std::this_thread::yield();
    } else {
      pending->wait();
    }
    EXPECT_EQ(read(from, 5), numbers(before, 5));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(1, kNcclCalls),
              ElementsAre("group_start", "send 5 float32 peer=2 s0", "recv 5 float32 peer=0 s0", "group_end"));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, CollectivesOfOneSubmitAreOneGroup) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    std::vector<Collective> calls;
    for (int i = 0; i < 3; ++i)
      calls.push_back(call_of(CollectiveKind::kAllGather, rank.room<float>(8), rank.room<float>(8), {8}));
    calls.push_back({.kind = CollectiveKind::kBarrier});
    rank.group->submit(calls, rank.stream).wait();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  const std::string one = "all_gather 8 float32 s0";
  EXPECT_THAT(world.gpu.log(0, kNcclCalls),
              ElementsAre("group_start", one, one, one, "all_reduce 1 int32 max s0", "group_end"));
}

TEST(Nccl, ABarrierMeetsAllRanks) {
  on_worlds([](NcclRank& rank, int /*size*/) { run(rank, {.kind = CollectiveKind::kBarrier}); });
}

TEST(Nccl, CountsBeyondTwoToThe31AreGivenWhole) {
  NcclWorld world(1);
  world.gpu.moves_data = false;
  constexpr std::uintptr_t kSend = std::uintptr_t{1} << 40U;
  constexpr std::uintptr_t kRecv = std::uintptr_t{1} << 42U;
  constexpr std::int64_t kElements = (std::int64_t{1} << 33U) + 5;
  world.gpu.pretend(0, kSend, std::size_t{4} * kElements);
  world.gpu.pretend(0, kRecv, std::size_t{4} * kElements);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    run(rank, call_of(CollectiveKind::kAllReduce, reinterpret_cast<const float*>(kSend),
                      reinterpret_cast<float*>(kRecv), {kElements}));
    run(rank, call_of(CollectiveKind::kBroadcast, reinterpret_cast<const float*>(kSend),
                      reinterpret_cast<float*>(kRecv), {kElements}));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(0, {"all_", "broadcast"}),
              ElementsAre("all_reduce 8589934597 float32 sum s0", "broadcast 8589934597 float32 root=0 s0"));
}

TEST(Nccl, CallsComeAfterWhatTheStreamHoldsAndBeforeWhatItGetsLater) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const data = rank.room<float>(4);
    float* const seen = rank.room<float>(4);
    void* const native = rank.stream.native();
    const auto fill = [=, own = rank.rank] {
      for (int i = 0; i < 4; ++i) data[i] = static_cast<float>(own + 1);
    };
    rank.gpu.hold(native, true);
    rank.gpu.enqueue(native, fill);  // a kernel that has not run when the call is made
    const Collective call = call_of(CollectiveKind::kAllReduce, data, data, {4});
    const Work work = rank.group->submit({&call, 1}, rank.stream);
    rank.gpu.enqueue(native, [=] { std::copy(data, data + 4, seen); });  // and one that reads the result
    const Event end = rank.stream.record();
    EXPECT_FALSE(work.event().ready()) << "submit() has come back before the device has done anything";
    rank.gpu.hold(native, false);
    end.wait();
    EXPECT_EQ(read(seen, 4), std::vector<float>(4, 3));
    work.wait();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, CallsOnTwoStreamsKeepTheOrderOfSubmission) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const Stream second = rank.device.make_stream("second");
    float* const a = rank.put(numbers(rank.rank, 4));
    float* const b = rank.put(numbers(rank.rank, 4));
    const Collective first_call = call_of(CollectiveKind::kAllReduce, a, a, {4});
    const Collective second_call = call_of(CollectiveKind::kBroadcast, rank.rank == 0 ? b : nullptr, b, {4});
    // The streams swap places from rank to rank: only the order of submission is the same.
    const Work one = rank.group->submit({&first_call, 1}, rank.rank == 0 ? rank.stream : second);
    const Work two = rank.group->submit({&second_call, 1}, rank.rank == 0 ? second : rank.stream);
    two.wait();
    one.wait();
    EXPECT_EQ(b[3], numbers(0, 4)[3]);
    EXPECT_EQ(a[3], numbers(0, 4)[3] + numbers(1, 4)[3]);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, AnotherStreamCanBeOrderedAfterACall) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const Stream compute = rank.device.make_stream("compute");
    float* const from = rank.room<float>(1);
    float* const to = rank.room<float>(1);
    float* const seen = rank.room<float>(1);
    rank.gpu.hold(rank.stream.native(), true);
    rank.gpu.enqueue(rank.stream.native(), [=] { *from = 7; });
    const Collective call = call_of(CollectiveKind::kAllGather, from, to, {1});
    const Work work = rank.group->submit({&call, 1}, rank.stream);
    work.order_before(compute);
    rank.gpu.enqueue(compute.native(), [=] { *seen = *to; });
    const Event end = compute.record();
    EXPECT_FALSE(end.ready());
    rank.gpu.hold(rank.stream.native(), false);
    end.wait();
    EXPECT_EQ(*seen, 7);
    // A stream of the host waits on the host.
    const auto cpu = make_cpu_device();
    const Stream host = cpu->make_stream("host");
    rank.group->submit({&call, 1}, rank.stream).order_before(host);
    EXPECT_NO_THROW(host.synchronize());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, EventsAreUsedAgain) {
  NcclWorld world(1);
  std::size_t after_ten = 0;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const data = rank.room<float>(1);
    for (int i = 0; i < 100; ++i) {
      run(rank, call_of(CollectiveKind::kAllReduce, data, data, {1}));
      if (i == 10) after_ten = rank.gpu.living_events();
    }
    EXPECT_EQ(rank.gpu.living_events(), after_ten);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(Nccl, CallsOnStreamsOfTheHostAreTheBasesWithBuffersOfTheHost) {
  NcclWorld world(3);
  world.options.reduction = Reduction::kRankOrder;  // the base's sums are in rank order in any case
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const Communicator comm{std::shared_ptr<CommBackend>(std::move(rank.group))};
    std::vector<float> data{static_cast<float>(rank.rank)};
    comm.all_reduce(std::span<float>(data));
    EXPECT_EQ(data[0], 3);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(0, kNcclCalls), IsEmpty());
}

TEST(Nccl, PartsAreGroupsOfTheirOwn) {
  NcclWorld world(3);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    // Rank 1 is in none; of the others the last comes first.
    const auto part = rank.group->split(rank.rank == 1 ? -1 : 4, -rank.rank, "ends");
    EXPECT_EQ(part == nullptr, rank.rank == 1);
    float* const data = rank.put(numbers(rank.rank, 3));
    if (part) {
      EXPECT_EQ(part->kind(), "nccl");
      EXPECT_EQ(part->group_name(), "world/ends");
      EXPECT_EQ(part->size(), 2);
      EXPECT_EQ(part->rank(), rank.rank == 2 ? 0 : 1);
      const Collective call = call_of(CollectiveKind::kBroadcast, part->rank() == 0 ? data : nullptr, data, {3}, 0);
      part->submit({&call, 1}, rank.stream).wait();
      EXPECT_EQ(read(data, 3), numbers(2, 3));
    }
    // The whole group is as it was.
    float* const all = rank.put(numbers(rank.rank, 1));
    run(rank, call_of(CollectiveKind::kAllReduce, all, all, {1}));
    EXPECT_EQ(all[0], 600);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
  EXPECT_EQ(world.gpu.living_comms(), 0U);
  EXPECT_THAT(world.gpu.log(1, {"split"}), ElementsAre("split color=-1 key=-1"));
  EXPECT_THAT(world.gpu.log(2, {"split"}), ElementsAre("split color=4 key=-2"));
}

TEST(Nccl, AttachedDeviceMemoryIsRegisteredUntilTheGroupGoes) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    std::weak_ptr<void> kept;
    {
      const Arena arena = rank.device.make_arena(ArenaKind::kDevice, 4096, "gradients");
      const PeerWindow window = rank.group->attach(arena, "gradients");
      kept = arena.keep_alive();
      ASSERT_EQ(window.ranks.size(), 2U);
      EXPECT_EQ(window.ranks[static_cast<std::size_t>(rank.rank)].data(), arena.data());
      EXPECT_TRUE(window.ranks[static_cast<std::size_t>(1 - rank.rank)].empty());
    }
    EXPECT_FALSE(kept.expired()) << "NCCL still has it";
    rank.group.reset();
    EXPECT_TRUE(kept.expired());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(1, {"register", "deregister", "finalize", "destroy", "abort"}),
              ElementsAre("register 4096", "deregister", "finalize", "destroy"));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(Nccl, MemoryOfADeviceIsNoWindowOfTheHost) {
  std::byte bytes[8] = {};
  const Arena arena = Arena::over(ArenaKind::kDevice, bytes, "gradients", nullptr);
  for (const char* name : {"self", "inproc", "shm"}) {
    const auto group = make_backend(name, {.rank = 0, .size = 1, .job = "no-window", .hub = make_inproc_hub(1)});
    EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)group->attach(arena, "gradients"); }), HasSubstr("arena"))
        << name;
  }
}

TEST(Nccl, MemoryThatNcclDoesNotRegisterIsNotDeregistered) {
  NcclWorld world(1);
  world.gpu.registers = false;
  const auto errors = world.try_ranks([](NcclRank& rank) {
    (void)rank.group->attach(rank.device.make_arena(ArenaKind::kDevice, 4096, "gradients"), "gradients");
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.log(0, {"register", "deregister"}), ElementsAre("register 4096"));
}

TEST(Nccl, AttachWorksWithoutRegistration) {
  NcclWorld world(1);
  world.tables[0].register_buffer = nullptr;
  world.tables[0].deregister_buffer = nullptr;
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const Arena arena = rank.device.make_arena(ArenaKind::kDevice, 4096, "gradients");
    EXPECT_EQ(rank.group->attach(arena, "gradients").ranks[0].size(), 4096U);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(Nccl, ReportsBytesAsTheFormulaHasThem) {
  NcclWorld world(2);
  auto table = std::make_shared<TrafficTable>();
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 0) rank.group->set_observer(table);
    float* const data = rank.room<float>(8'192);
    run(rank, call_of(CollectiveKind::kAllReduce, data, data, {8'192}));
    run(rank, call_of(CollectiveKind::kAllGather, data, rank.room<float>(20), {10, 10}));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(table->row(CollectiveKind::kAllReduce), (TrafficRow{.calls = 1, .bytes = 32'768}));
  EXPECT_EQ(table->row(CollectiveKind::kAllGather), (TrafficRow{.calls = 1, .bytes = 40}));
}

TEST(Nccl, BytesAreThoseOfTheFormulaByKindAndPeer) {
  const auto received = [](Collective call, int size) {
    call.in_dtype = call.out_dtype = DType::kFloat32;
    std::vector<std::uint64_t> bytes;
    for (int peer = 0; peer < size; ++peer) bytes.push_back(detail::received_from(call, 1, size, peer));
    return bytes;
  };
  using Kind = CollectiveKind;
  EXPECT_THAT(received({.kind = Kind::kAllGather, .counts = {5, 6, 7}}, 3), ElementsAre(20, 0, 28));
  EXPECT_THAT(received({.kind = Kind::kReduceScatter, .counts = {5, 6, 7}}, 3), ElementsAre(24, 0, 24));
  EXPECT_THAT(received({.kind = Kind::kAllReduce, .counts = {10}}, 3), ElementsAre(40, 0, 40));
  EXPECT_THAT(received({.kind = Kind::kAllReduce, .counts = {10'000}}, 3),
              ElementsAre(4 * (3'334 + 3'333), 0, 4 * 2 * 3'333));
  EXPECT_THAT(received({.kind = Kind::kBroadcast, .counts = {5}, .root = 2}, 3), ElementsAre(0, 0, 20));
  EXPECT_THAT(received({.kind = Kind::kBroadcast, .counts = {5}, .root = 1}, 3), ElementsAre(0, 0, 0));
  EXPECT_THAT(received({.kind = Kind::kGather, .counts = {5, 6, 7}, .root = 1}, 3), ElementsAre(20, 0, 28));
  EXPECT_THAT(received({.kind = Kind::kGather, .counts = {5, 6, 7}, .root = 0}, 3), ElementsAre(0, 0, 0));
  EXPECT_THAT(received({.kind = Kind::kScatter, .counts = {5, 6, 7}, .root = 2}, 3), ElementsAre(0, 0, 24));
  EXPECT_THAT(received({.kind = Kind::kAllToAll, .counts = {1, 1, 1}, .recv_counts = {2, 3, 4}}, 3),
              ElementsAre(8, 0, 16));
  EXPECT_THAT(received({.kind = Kind::kRecv, .counts = {5}, .root = 0}, 3), ElementsAre(20, 0, 0));
  EXPECT_THAT(received({.kind = Kind::kSend, .counts = {5}, .root = 0}, 3), ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace zeroth
