// What the backend over NCCL says and does when something goes wrong, on fakes of NCCL and CUDA.
#include "comm/nccl/nccl_calls.h"
#include "support/error_of.h"
#include "support/message_hub.h"
#include "support/nccl_ranks.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/dtype.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/decorators.h>
#include <zeroth/comm/messages.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;
using test::FakeGpu;
using test::NcclRank;
using test::NcclWorld;
using test::submit;
using test::sum_of;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

/// What submit() throws at once.
std::string refusal(NcclRank& rank, ErrorCode code, const std::vector<Collective>& calls) {
  return error_of(code, [&] { (void)rank.group->submit(calls, rank.stream); });
}

// What NCCL cannot do.

TEST(NcclRefuses, FloatingPointReductionsInRankOrder) {
  NcclWorld world(2);
  world.options.reduction = Reduction::kRankOrder;
  const auto errors = world.try_ranks([](NcclRank& rank) {
    float* const data = rank.room<float>(4);
    Collective call = sum_of(data, 4);
    EXPECT_THAT(
        refusal(rank, ErrorCode::kConfig, {call}),
        AllOf(HasSubstr("NCCL adds floating-point numbers in an order of its own, and rank order was asked for"),
              HasSubstr("all_reduce float32 [4]"), HasSubstr("set CommOptions::reduction to kTransport")));
    call.op = ReduceOp::kMax;
    EXPECT_THAT(refusal(rank, ErrorCode::kConfig, {call}), HasSubstr("NaN"));
    // What has the same bits in any order is done.
    auto* const whole = rank.put(std::vector<std::int32_t>{1, 2});
    Collective integers = sum_of(reinterpret_cast<float*>(whole), 2);
    integers.in_dtype = integers.out_dtype = DType::kInt32;
    submit(rank, integers).wait();
    EXPECT_EQ(whole[1], 4);
    const Collective moved{.kind = CollectiveKind::kBroadcast,
                           .in_dtype = DType::kFloat32,
                           .out_dtype = DType::kFloat32,
                           .send = reinterpret_cast<const std::byte*>(data),
                           .recv = reinterpret_cast<std::byte*>(data),
                           .counts = {4}};
    submit(rank, moved).wait();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(NcclRefuses, AReductionThatChangesTheDtypeOrAddsToWhatIsThere) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    Collective call = sum_of(rank.room<float>(4), 4);
    call.recv = reinterpret_cast<std::byte*>(rank.room<float>(4));
    call.in_dtype = DType::kBFloat16;
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {call}),
                AllOf(HasSubstr("NCCL's reductions keep the dtype"), HasSubstr("bfloat16 to float32")));
    call.in_dtype = DType::kFloat32;
    call.kind = CollectiveKind::kReduceScatter;
    call.accumulate = true;
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {call}), HasSubstr("NCCL does not add to what is there"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclRefuses, BuffersThatAreNotOfItsDevice) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    std::vector<float> host(4);
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {sum_of(host.data(), 4)}),
                AllOf(HasSubstr("a buffer on a CUDA stream is memory of the host"), HasSubstr("send of all_reduce")));
    auto* const other = reinterpret_cast<float*>(rank.gpu.allocate(1 - rank.rank, 16));
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {sum_of(other, 4)}),
                AllOf(HasSubstr("a buffer is on another device"),
                      HasSubstr("got: memory of device " + std::to_string(1 - rank.rank))));
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {sum_of(nullptr, 4)}), HasSubstr("send is null"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclRefuses, MemoryOfADeviceOnAStreamOfTheHost) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const auto cpu = make_cpu_device();
    const Collective call = sum_of(rank.room<float>(4), 4);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)rank.group->submit({&call, 1}, cpu->make_stream("host")); }),
                AllOf(HasSubstr("a buffer on a stream of the host is memory of a device"),
                      HasSubstr("got: memory of device 0")));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclRefuses, CallsOfOneSubmitThatTouchEachOthersBuffers) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    float* const data = rank.room<float>(16);
    const auto moved = [&](int from, int to) {
      return Collective{.kind = CollectiveKind::kAllGather,
                        .in_dtype = DType::kFloat32,
                        .out_dtype = DType::kFloat32,
                        .send = reinterpret_cast<const std::byte*>(data + from),
                        .recv = reinterpret_cast<std::byte*>(data + to),
                        .counts = {4}};
    };
    const std::string text = "touch each other's buffers, and NCCL runs them in any order";
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {moved(0, 4), moved(4, 8)}), HasSubstr(text))
        << "reads what was written";
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {moved(0, 8), moved(4, 8)}), HasSubstr(text)) << "writes the same";
    EXPECT_THAT(refusal(rank, ErrorCode::kUsage, {moved(0, 8), moved(4, 0)}), HasSubstr(text)) << "writes what is read";
    rank.group->submit(std::vector<Collective>{moved(0, 8), moved(0, 12)}, rank.stream).wait();  // both read: fine
    const std::vector<Collective> in_order{moved(0, 4)};
    rank.group->submit(in_order, rank.stream).wait();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Coming together.

TEST(NcclOpens, AWorldThatNeverConnectsIsATimeoutThatNamesRanks) {
  NcclWorld world(3);
  world.options.timeout = Milliseconds{400};
  world.gpu.never_opens = true;
  const Deadline in_time(Milliseconds{5'000});
  const auto errors = world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; });
  EXPECT_FALSE(in_time.passed());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)], HasSubstr("rank " + std::to_string(rank) + "/3"));
  }
  EXPECT_THAT(errors, Contains(AllOf(StartsWith("[TIMEOUT] NCCL has not connected the ranks within 0.4 s"),
                                     HasSubstr("not yet there either: ranks "))));
  EXPECT_EQ(world.gpu.living_comms(), 0U) << "what did not come together is aborted";
  EXPECT_THAT(world.gpu.log(0, {"init"}), Contains("init 0/3 blocking=0"));
}

TEST(NcclOpens, ARankThatCannotTellsTheOthersWhy) {
  NcclWorld world(3);
  world.before_loading = [](int rank) {
    if (rank == 1)
      throw Error(ErrorCode::kEnvironment, "NCCL was asked for, and cannot be loaded", {.where = "comm.nccl"});
  };
  const Deadline in_time(Milliseconds{5'000});
  const auto errors = world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; });
  EXPECT_FALSE(in_time.passed()) << "nobody waits for it";
  EXPECT_THAT(errors[1], StartsWith("[ENVIRONMENT] NCCL was asked for"));
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_THAT(errors[rank], AllOf(StartsWith("[ENVIRONMENT] a rank cannot use NCCL"), HasSubstr("which: rank 1"),
                                    HasSubstr("cannot be loaded")));
  }
  EXPECT_THAT(world.gpu.log(0, {"init"}), IsEmpty());
}

TEST(NcclOpens, WithoutADeviceItSaysWhatCudaSays) {
  NcclWorld world(1);
  world.gpu.count_status = detail::kCudaInsufficientDriver;
  EXPECT_THAT(world.try_ranks([](NcclRank&) {})[0],
              AllOf(StartsWith("[ENVIRONMENT] there is no CUDA device"),
                    HasSubstr("driver for CUDA 13000, runtime 13000 (a fake CUDA)")));
  world.gpu.count_status = detail::kCudaSuccess;
  world.set_options = [](int, CommOptions& options) { options.device = 5; };
  EXPECT_THAT(world.try_ranks([](NcclRank&) {})[0],
              AllOf(StartsWith("[CONFIG] there is no such CUDA device"), HasSubstr("expected: 0 to 0")));
}

TEST(NcclOpens, TwoRanksWithOneGpuAreNamed) {
  NcclWorld world(3);
  world.set_options = [](int rank, CommOptions& options) { options.device = rank == 2 ? 0 : rank; };
  const auto errors = world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; });
  EXPECT_THAT(errors, Each(AllOf(StartsWith("[CONFIG] two ranks have the same GPU"), HasSubstr("ranks 0 and 2"),
                                 HasSubstr("0000:00:00.0 for both"))));
}

TEST(NcclOpens, DifferentVersionsAndOrdersAreMismatches) {
  NcclWorld world(2);
  world.tables[1].version = 21'903;
  world.tables[1].library = "an older NCCL";
  for (const std::string& error : world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; })) {
    EXPECT_THAT(error, AllOf(StartsWith("[MISMATCH] ranks have different versions of NCCL"),
                             HasSubstr("2.28.9 (a fake NCCL, rank 0)"), HasSubstr("2.19.3 (an older NCCL, rank 1)")));
  }
  world.tables[1] = world.tables[0];
  world.cudas[1].version = 12'060;
  world.cudas[1].library = "an older CUDA";
  for (const std::string& error : world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; })) {
    EXPECT_THAT(error, AllOf(StartsWith("[MISMATCH] ranks have different versions of the CUDA runtime"),
                             HasSubstr("13.0 (a fake CUDA, rank 0)"), HasSubstr("12.6 (an older CUDA, rank 1)")));
  }
  world.cudas[1] = world.cudas[0];
  world.set_options = [](int rank, CommOptions& options) {
    options.reduction = rank == 0 ? Reduction::kRankOrder : Reduction::kTransport;
  };
  EXPECT_THAT(world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; }),
              Each(StartsWith("[MISMATCH] ranks ask for different orders of sums")));
}

TEST(NcclOpens, WhatNcclRefusesIsSaidWithItsWords) {
  for (const std::string call : {"unique_id", "init"}) {
    NcclWorld world(1);
    world.gpu.refuse = call;
    EXPECT_THAT(world.try_ranks([](NcclRank&) {})[0],
                AllOf(StartsWith("[RESOURCE] NCCL refused"),
                      HasSubstr("error 2, a fake error: socket closed by a fake peer"), HasSubstr("NCCL_DEBUG=WARN")))
        << call;
    EXPECT_EQ(world.gpu.living_comms(), 0U);
  }
}

// While calls run.

TEST(NcclFails, AnErrorThatNcclFindsLaterEndsTheWaitAndTheGroup) {
  struct Row {
    detail::NcclStatus status;
    std::string code;
  };
  for (const Row& row :
       {Row{detail::NcclStatus::kRemoteError, "[PEER_LOST]"}, Row{detail::NcclStatus::kSystemError, "[RESOURCE]"},
        Row{detail::NcclStatus::kInternalError, "[RESOURCE]"}, Row{detail::NcclStatus::kInvalidUsage, "[USAGE]"}}) {
    NcclWorld world(2);
    std::atomic<bool> failed = false;
    const auto errors = world.try_ranks([&](NcclRank& rank) {
      if (rank.rank == 1) {  // makes no call
        while (!failed.load()) std::this_thread::yield();
        return;
      }
      const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
      rank.gpu.fail_comms(0, row.status);
      const std::string text = error_of(ErrorCode::kInternal, [&] {
        try {
          work.wait();
        } catch (const Error& error) {
          throw Error(ErrorCode::kInternal, error.what());
        }
      });
      EXPECT_THAT(text, AllOf(HasSubstr(row.code), HasSubstr("rank 0/2"), HasSubstr("comm.nccl group=world"),
                              HasSubstr("socket closed by a fake peer")));
      EXPECT_THAT(rank.gpu.log(0, {"abort"}), Contains("abort")) << "its kernels would spin for ever";
      // Again the same, from that work and from every later call.
      const auto said_by = [](const Work& done) -> std::string {
        try {
          done.wait();
        } catch (const Error& error) {
          return error.what();
        }
        return "nothing";
      };
      const std::string first = said_by(work);
      EXPECT_EQ(said_by(submit(rank, sum_of(rank.room<float>(4), 4))), first);
      EXPECT_THAT(text, HasSubstr(first));
      EXPECT_THAT(error_of(ErrorCode::kInternal,
                           [&] {
                             try {
                               (void)rank.group->split(0, 0, "part");
                             } catch (const Error& error) {
                               throw Error(ErrorCode::kInternal, error.what());
                             }
                           }),
                  HasSubstr(first))
          << "and no other rank is asked for anything";
      failed.store(true);
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    EXPECT_THAT(world.gpu.violations(), IsEmpty());
    EXPECT_EQ(world.gpu.living_comms(), 0U);
  }
}

TEST(NcclFails, ACallThatNcclRefusesIsInItsWork) {
  for (const std::string call : {"all_reduce", "group_end"}) {
    NcclWorld world(1);
    world.gpu.refuse = call;
    const auto errors = world.try_ranks([](NcclRank& rank) {
      const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
      EXPECT_THAT(error_of(ErrorCode::kResource, [&] { work.wait(); }), HasSubstr("NCCL refused"));
      // NCCL's group of this thread was ended all the same: another group of ranks can call.
      rank.gpu.refuse.clear();
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << call;
    EXPECT_EQ(std::ranges::count(world.gpu.log(0), "group_start"), std::ranges::count(world.gpu.log(0), "group_end"))
        << call;
  }
}

TEST(NcclFails, AnErrorOfTheDeviceIsSaidWithItsWords) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    rank.gpu.event_status = 700;
    EXPECT_THAT(error_of(ErrorCode::kResource, [&] { work.wait(); }),
                HasSubstr("error 700, an illegal memory access was encountered"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclFails, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  NcclWorld world(3);
  world.options.timeout = Milliseconds{1'000};
  std::atomic<int> left = 2;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const data = rank.room<float>(4);
    submit(rank, sum_of(data, 4)).wait();
    const auto stay = [&] {  // who leaves is lost to the others before their deadline
      while (left.load() > 0) std::this_thread::yield();
    };
    if (rank.rank == 1) return stay();
    const Work work = submit(rank, sum_of(data, 4, {.unit = 3, .label = 1}));
    const Deadline in_time(Milliseconds{8'000});
    EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { work.wait(); }),
                AllOf(HasSubstr("rank 1 has made 1 of 2 calls"), HasSubstr("all_reduce#1 float32"),
                      HasSubstr("which: unit 3"), Not(HasSubstr("rank 2 has"))));
    EXPECT_FALSE(in_time.passed());
    --left;
    stay();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(NcclFails, AMessageThatNobodyTakesNamesThePeerAtTheDeadline) {
  NcclWorld world(2);
  world.options.timeout = Milliseconds{200};
  std::atomic<bool> done = false;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 1) {
      while (!done.load()) std::this_thread::yield();
      return;
    }
    const Work work = submit(rank, Communicator::send_call(std::span<const float>(rank.room<float>(4), 4), 1));
    EXPECT_THAT(
        error_of(ErrorCode::kTimeout, [&] { work.wait(); }),
        AllOf(HasSubstr("every peer is alive"), HasSubstr("expected: send#0 float32, 4 elements (16 B) to rank 1")));
    done.store(true);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclFails, DifferentCallsAreAMismatchWithBothSides) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([](NcclRank& rank) {
    float* const data = rank.room<float>(8);
    submit(rank, sum_of(data, 4)).wait();
    submit(rank, sum_of(data, rank.rank == 0 ? 4 : 8)).wait();  // the fake hangs, as NCCL does
  });
  for (const std::string& error : errors) {
    EXPECT_THAT(
        error, AllOf(StartsWith("[MISMATCH] ranks make different calls"), HasSubstr("all_reduce#1 float32, 4 elements"),
                     HasSubstr("all_reduce#1 float32, 8 elements")));
  }
}

TEST(NcclFails, EqualShapesWithOtherTagsAreAMismatchToo) {
  NcclWorld world(2);
  world.options.timeout = Milliseconds{2'000};
  const auto errors = world.try_ranks([](NcclRank& rank) {
    float* const data = rank.room<float>(8);
    const Work work = submit(rank, sum_of(data, 4, {.unit = rank.rank, .label = 0}));  // NCCL does it, with wrong data
    work.wait();
    // A rank that was too early to see the other one's call sees it in the next wait.
    submit(rank, sum_of(data, 4)).wait();
  });
  EXPECT_THAT(errors,
              Contains(AllOf(StartsWith("[MISMATCH]"), HasSubstr("unit 0 on rank"), HasSubstr("unit 1 on rank"))));
}

/// A base whose peers are lost from some moment on.
class Losing final : public ForwardingBackend {
 public:
  Losing(std::unique_ptr<CommBackend> base, std::atomic<bool>& lost)
      : ForwardingBackend(std::move(base)), lost_(lost) {}
  void check_peers(const WaitContext& context) override {
    if (lost_.load())
      throw Error(ErrorCode::kPeerLost, "rank 1 (pid 4711) was killed by SIGKILL", {.which = context.what});
    inner().check_peers(context);
  }

 private:
  std::atomic<bool>& lost_;
};

TEST(NcclFails, AWaitSeesThatThePeerWasLost) {
  NcclWorld world(2);
  std::atomic<bool> lost = false;
  std::atomic<bool> done = false;
  world.wrap_base = [&](int, std::unique_ptr<CommBackend> base) {
    return std::make_unique<Losing>(std::move(base), lost);
  };
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 1) {
      while (!done.load()) std::this_thread::yield();
      return;
    }
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    lost.store(true);
    const Deadline in_time(Milliseconds{5'000});
    EXPECT_THAT(error_of(ErrorCode::kPeerLost, [&] { work.wait(); }),
                AllOf(HasSubstr("was killed by SIGKILL"), HasSubstr("all_reduce#0")));
    EXPECT_FALSE(in_time.passed()) << "long before the deadline";
    done.store(true);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclFails, WhatAPeerHadDoneBeforeItLeftStillCounts) {
  NcclWorld world(2);
  std::atomic<bool> lost = false;
  world.wrap_base = [&](int, std::unique_ptr<CommBackend> base) {
    return std::make_unique<Losing>(std::move(base), lost);
  };
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    rank.gpu.hold(rank.stream.native(), true);
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    lost.store(true);
    std::thread device([&] {
      std::this_thread::sleep_for(kWaitSlice + Milliseconds{50});  // after the first look at the peers
      rank.gpu.hold(rank.stream.native(), false);
    });
    EXPECT_NO_THROW(work.wait());
    device.join();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Calls that are compared before they are made.

enum class Base { kWithWindows, kMessages };

/// A world whose ranks compare; each test runs over a base with windows, which has a call board besides, and over one
/// without.
class NcclGate : public ::testing::TestWithParam<Base> {
 protected:
  static void set_up(NcclWorld& world) {
    world.options.check_calls = true;
    world.options.timeout = std::min(world.options.timeout, Milliseconds{10'000});
    if (GetParam() == Base::kWithWindows) return;
    world.wrap_base = [&world, hub = std::make_shared<test::MessageHub>(world.size, true)](
                          int rank, std::unique_ptr<CommBackend> /*with_windows*/) {
      return make_message_backend(hub->transport(rank), world.options);
    };
  }
};
INSTANTIATE_TEST_SUITE_P(Bases, NcclGate, ::testing::Values(Base::kWithWindows, Base::kMessages),
                         [](const auto& of) { return of.param == Base::kWithWindows ? "Inproc" : "Messages"; });

/// Calls of NCCL that move data, on the rank's device.
std::vector<std::string> moved(FakeGpu& gpu, int rank) {
  return gpu.log(rank, {"all_", "reduce", "broadcast", "send", "recv", "copy"});
}

TEST_P(NcclGate, SwappedCallsOfOneRankAreRefusedOnEveryRankBeforeAnyDataMoves) {
  constexpr int kRanks = 3;
  NcclWorld world(kRanks);
  set_up(world);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    EXPECT_EQ(rank.group->capabilities().one_sided, GetParam() == Base::kWithWindows);
    float* const first = rank.put(std::vector<float>(4, 1));
    float* const second = rank.put(std::vector<float>(4, 2));
    submit(rank, sum_of(first, 4)).wait();
    EXPECT_EQ(first[0], kRanks);
    EXPECT_EQ(moved(rank.gpu, rank.rank).size(), 1U);
    // Equal shapes: NCCL would add the one to the other.
    const bool swaps = rank.rank == 1;
    const Deadline in_time(Milliseconds{5'000});
    const Work work =
        submit(rank, swaps ? sum_of(second, 4, {.unit = 2, .label = 0}) : sum_of(first, 4, {.unit = 1, .label = 0}));
    const std::string text = error_of(ErrorCode::kMismatch, [&] { work.wait(); });
    EXPECT_FALSE(in_time.passed()) << "long before the deadline";
    EXPECT_THAT(text, AllOf(HasSubstr("ranks make different calls"), HasSubstr("comm.nccl group=world"),
                            HasSubstr("all_reduce#1 float32, 4 elements")));
    const int other = swaps ? 0 : 1;
    EXPECT_THAT(text,
                AllOf(HasSubstr("unit " + std::to_string(swaps ? 2 : 1) + " on rank " + std::to_string(rank.rank)),
                      HasSubstr("unit " + std::to_string(swaps ? 1 : 2) + " on rank " + std::to_string(other))));
    const Work again =
        submit(rank, swaps ? sum_of(first, 4, {.unit = 1, .label = 0}) : sum_of(second, 4, {.unit = 2, .label = 0}));
    EXPECT_EQ(error_of(ErrorCode::kMismatch, [&] { again.wait(); }), text);
    EXPECT_EQ(first[3], kRanks);
    EXPECT_EQ(second[3], 2);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(moved(world.gpu, rank).size(), 1U) << "rank " << rank << " gave NCCL no more than the first";
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
  EXPECT_EQ(world.gpu.living_comms(), 0U);
}

TEST_P(NcclGate, CallsOfOtherSizesDtypesAndKindsAreRefused) {
  struct Row {
    std::string own;
    std::function<void(Collective&)> change;
  };
  for (const Row& row :
       {Row{"all_reduce#0 float32, 8 elements", [](Collective& call) { call.counts = {8}; }},
        Row{"all_reduce#0 int32", [](Collective& call) { call.in_dtype = call.out_dtype = DType::kInt32; }},
        Row{"all_reduce#0 max float32", [](Collective& call) { call.op = ReduceOp::kMax; }},
        Row{"broadcast#0 float32", [](Collective& call) { call.kind = CollectiveKind::kBroadcast; }}}) {
    NcclWorld world(2);
    set_up(world);
    const auto errors = world.try_ranks([&](NcclRank& rank) {
      float* const data = rank.room<float>(8);
      Collective call = sum_of(data, 4);
      if (rank.rank == 1) row.change(call);
      submit(rank, call).wait();
    });
    EXPECT_THAT(errors, Each(AllOf(StartsWith("[MISMATCH] ranks make different calls"),
                                   HasSubstr("all_reduce#0 float32, 4 elements"), HasSubstr(row.own))));
    for (const int rank : {0, 1}) EXPECT_THAT(moved(world.gpu, rank), IsEmpty()) << row.own;
  }
}

/// Those calls are the base's, which does not see what others give to NCCL.
TEST_P(NcclGate, ACallAgainstASplitOrAnAttachIsRefused) {
  for (const bool splits : {true, false}) {
    if (!splits && GetParam() == Base::kMessages) continue;  // which has no windows
    NcclWorld world(2);
    set_up(world);
    const auto errors = world.try_ranks([&](NcclRank& rank) {
      const Deadline in_time(Milliseconds{5'000});
      const std::string text = error_of(ErrorCode::kMismatch, [&] {
        if (rank.rank == 0) return submit(rank, sum_of(rank.room<float>(4), 4)).wait();
        if (splits) return (void)rank.group->split(0, 0, "part");
        (void)rank.group->attach(Arena::create(ArenaKind::kPrivate, 4096, "test"), "part");
      });
      EXPECT_FALSE(in_time.passed()) << "long before the deadline";
      EXPECT_THAT(text, AllOf(HasSubstr("all_reduce#0 float32, 4 elements"),
                              HasSubstr(splits ? "\"split part\" (rank 1)" : "\"attach part\" (rank 1)")));
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
    EXPECT_THAT(moved(world.gpu, 0), IsEmpty());
  }
}

TEST_P(NcclGate, PartsOfAnAllToAllAreComparedToo) {
  NcclWorld world(2);
  set_up(world);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    Collective call{.kind = CollectiveKind::kAllToAll,
                    .in_dtype = DType::kFloat32,
                    .out_dtype = DType::kFloat32,
                    .send = reinterpret_cast<const std::byte*>(rank.room<float>(8)),
                    .recv = reinterpret_cast<std::byte*>(rank.room<float>(8)),
                    .counts = {2, 2}};
    call.recv_counts = {2, 2};
    if (rank.rank == 1) call.counts[0] = 3;
    submit(rank, call).wait();
  });
  EXPECT_THAT(errors, Each(AllOf(StartsWith("[MISMATCH]"), HasSubstr("2 elements, which rank 0 takes from rank 1"),
                                 HasSubstr("3 elements, which rank 1 gives to rank 0"))));
  for (const int rank : {0, 1}) EXPECT_THAT(moved(world.gpu, rank), IsEmpty());
}

TEST_P(NcclGate, ARankThatDoesNotComeIsATimeoutBeforeTheCall) {
  NcclWorld world(2);
  world.options.timeout = Milliseconds{500};
  set_up(world);
  std::atomic<bool> done = false;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 1) {
      while (!done.load()) std::this_thread::yield();
      return;
    }
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4, {.unit = 3, .label = 0}));
    EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { work.wait(); }),
                AllOf(HasSubstr("all_reduce#0 float32"), HasSubstr("unit 3"), HasSubstr("comm.nccl group=world")));
    done.store(true);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(moved(world.gpu, 0), IsEmpty());
}

TEST_P(NcclGate, PartsHaveGatesOfTheirOwn) {
  NcclWorld world(3);
  set_up(world);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    const auto part = rank.group->split(rank.rank == 1 ? -1 : 0, rank.rank, "ends");
    float* const data = rank.room<float>(8);
    if (part) {
      const Collective call = sum_of(data, rank.rank == 0 ? 4 : 8);
      EXPECT_THAT(error_of(ErrorCode::kMismatch, [&] { part->submit({&call, 1}, rank.stream).wait(); }),
                  AllOf(HasSubstr("comm.nccl group=world/ends"), HasSubstr("4 elements"), HasSubstr("8 elements")));
    }
    EXPECT_THAT(moved(rank.gpu, rank.rank), IsEmpty());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(world.gpu.living_comms(), 0U);
}

TEST_P(NcclGate, RanksMayPutTheirCallsTogetherInDifferentWays) {
  NcclWorld world(2);
  set_up(world);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const first = rank.put(std::vector<float>{1});
    float* const second = rank.put(std::vector<float>{2});
    if (rank.rank == 0) {
      rank.group->submit(std::vector<Collective>{sum_of(first, 1), sum_of(second, 1)}, rank.stream).wait();
    } else {
      submit(rank, sum_of(first, 1)).wait();  // which rank 0 must have begun before it asks for the second one
      submit(rank, sum_of(second, 1)).wait();
    }
    EXPECT_EQ(*first, 2);
    EXPECT_EQ(*second, 4);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST_P(NcclGate, MessagesBetweenTwoRanksMeetNobodyElse) {
  NcclWorld world(3);
  set_up(world);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const data = rank.put(std::vector<float>(4, static_cast<float>(rank.rank)));
    if (rank.rank == 0) submit(rank, Communicator::send_call(std::span<const float>(data, 4), 2)).wait();
    if (rank.rank == 2) submit(rank, Communicator::recv_call(std::span<float>(data, 4), 0)).wait();
    EXPECT_EQ(data[3], rank.rank == 1 ? 1 : 0);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST_P(NcclGate, CallsOfTheHostThatWereSubmittedBeforeAreMadeBefore) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    NcclWorld world(2);
    set_up(world);
    const auto errors = world.try_ranks([&](NcclRank& rank) {
      const auto late = make_cpu_device(ExecutionMode::kChaos, seed);
      const Stream host = late->make_stream("late");
      std::vector<float> on_host{1};
      const Collective call = sum_of(on_host.data(), 1);
      const Work of_host = rank.group->submit({&call, 1}, host);
      if (rank.rank == 0) of_host.wait();  // needs that rank 1 makes it, which else waits for rank 0 at the gate
      float* const data = rank.put(std::vector<float>{2});
      const Work of_device = submit(rank, sum_of(data, 1));
      of_host.wait();
      of_device.wait();
      EXPECT_EQ(on_host[0], 2);
      EXPECT_EQ(*data, 4);
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << seed;
  }
}

TEST_P(NcclGate, WhatRanksSayIsReportedAsControlBytesOfTheGroup) {
  NcclWorld world(2);
  set_up(world);
  const auto table = std::make_shared<TrafficTable>();
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    rank.group->set_observer(rank.rank == 0 ? table : nullptr);
    const auto part = rank.group->split(0, rank.rank, "part");
    const std::uint64_t before = table->control_bytes();
    const Collective call = sum_of(rank.room<float>(8'192), 8'192);
    part->submit({&call, 1}, rank.stream).wait();
    if (rank.rank == 0) {
      EXPECT_EQ(table->control_bytes() - before, 16U);
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(table->row("world/part", CollectiveKind::kAllReduce), (TrafficRow{.calls = 1, .bytes = 32'768}));
  EXPECT_EQ(table->row("world/part/checks", CollectiveKind::kAllGather), TrafficRow{});
}

TEST(NcclGateAtTheStart, RanksThatDoNotAllCompareAreRefused) {
  NcclWorld world(2);
  world.set_options = [](int rank, CommOptions& options) { options.check_calls = rank == 0; };
  EXPECT_THAT(world.try_ranks([](NcclRank&) { FAIL() << "a group was made"; }),
              Each(AllOf(StartsWith("[MISMATCH] some ranks want their calls compared"), HasSubstr("true (rank 0)"),
                         HasSubstr("false (rank 1)"))));
}

// Stopping.

TEST(NcclStops, AnAbortEndsWaitsOfAllRanksWithItsText) {
  NcclWorld world(2);
  std::atomic<bool> waiting = false;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 1) {
      while (!waiting.load()) std::this_thread::yield();
      rank.group->abort(Error(ErrorCode::kNonFinite, "three steps in a row without a finite gradient"));
      EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { submit(rank, sum_of(rank.room<float>(4), 4)).wait(); }),
                  HasSubstr("rank 1 stopped the job: [NONFINITE] three steps"));
      return;
    }
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    waiting.store(true);
    EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { work.wait(); }), HasSubstr("three steps in a row"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
  EXPECT_EQ(world.gpu.living_comms(), 0U);
}

TEST(NcclStops, OfTwoRanksThatStopTheJobBothSayTheFirst) {
  NcclWorld world(2);
  std::atomic<bool> stopped = false;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    while (rank.rank == 1 && !stopped.load()) std::this_thread::yield();
    rank.group->abort(Error(ErrorCode::kModel, "cause " + std::to_string(rank.rank)));
    stopped.store(true);
    EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { submit(rank, sum_of(rank.room<float>(4), 4)).wait(); }),
                HasSubstr("rank 0 stopped the job: [MODEL] cause 0"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(NcclStops, AnAbortFromAnotherThreadEndsTheWait) {
  NcclWorld world(2);
  std::atomic<bool> done = false;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    if (rank.rank == 1) {
      while (!done.load()) std::this_thread::yield();
      return;
    }
    const auto part = rank.group.get();
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      part->abort(Error(ErrorCode::kInternal, "planted"));
    });
    EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { work.wait(); }),
                HasSubstr("rank 0 stopped the job: [INTERNAL] planted"))
        << "also where the aborted kernel has come to its end";
    other.join();
    done.store(true);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(NcclStops, AnAbortThatNcclNeverFinishesIsLeftBehind) {
  NcclWorld world(1);
  world.options.timeout = Milliseconds{300};
  world.gpu.abort_blocks = true;
  const Deadline in_time(Milliseconds{6'000});
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    rank.gpu.hold(rank.stream.native(), true);
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    const Deadline stopping(Milliseconds{3'000});
    rank.group->abort(Error(ErrorCode::kInternal, "planted"));
    EXPECT_FALSE(stopping.passed());
    EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { work.wait(); }), HasSubstr("planted"));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_FALSE(in_time.passed()) << "neither the abort nor the end of the group waits for ever";
  world.gpu.release_aborts();
  while (world.gpu.living_comms() > 0) std::this_thread::yield();
}

TEST(NcclStops, AGroupThatGoesWithWorkUnderWayAborts) {
  NcclWorld world(1);
  std::optional<Work> work;
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    rank.gpu.hold(rank.stream.native(), true);
    work = submit(rank, sum_of(rank.room<float>(4), 4));
    rank.group.reset();
    EXPECT_THAT(rank.gpu.log(0, {"finalize", "abort"}), ::testing::ElementsAre("abort"));
    EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { work->wait(); }), HasSubstr("given up"));
    work.reset();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(NcclStops, AGroupDoesNotWaitForeverForPeersThatDoNotFinalize) {
  NcclWorld world(1);
  world.options.timeout = Milliseconds{200};
  world.gpu.finalize_blocks = true;
  const Deadline in_time(Milliseconds{3'000});
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    submit(rank, sum_of(rank.room<float>(4), 4)).wait();
    rank.group.reset();
  });
  EXPECT_FALSE(in_time.passed());
  EXPECT_THAT(errors, Each(IsEmpty()));
  while (world.gpu.living_comms() > 0) std::this_thread::yield();
  EXPECT_THAT(world.gpu.log(0, {"finalize", "abort", "destroy"}), ::testing::ElementsAre("finalize", "abort"));
}

TEST(NcclStops, WorkThatWasDoneWhenTheGroupWentIsGood) {
  NcclWorld world(2);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    float* const data = rank.put(std::vector<float>{1});
    const Work work = submit(rank, sum_of(data, 1));
    while (!work.event().ready()) std::this_thread::yield();
    rank.group.reset();
    EXPECT_NO_THROW(work.wait());
    EXPECT_EQ(*data, 2);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(world.gpu.violations(), IsEmpty());
}

TEST(NcclStops, AWorkThatOutlivesItsGroupIsStillReadable) {
  NcclWorld world(1);
  const auto errors = world.try_ranks([&](NcclRank& rank) {
    const Work work = submit(rank, sum_of(rank.room<float>(4), 4));
    work.wait();
    rank.group.reset();
    EXPECT_NO_THROW(work.wait());
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Words.

TEST(NcclTable, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(detail::nccl_version_text(22'809), "2.28.9");
  EXPECT_EQ(detail::nccl_version_text(21'800), "2.18.0");
  EXPECT_EQ(detail::nccl_version_text(2'708), "2.7.8");
}

}  // namespace
}  // namespace zeroth
