// Streams, events and memory of the CUDA device, on a fake of CUDA that runs things as late as it may.
#include "device/cuda/cuda_device.h"
#include "device/cuda/event_cache.h"
#include "support/error_of.h"
#include "support/fake_gpu.h"

#include <zeroth/base/interrupt.h>
#include <zeroth/device/device.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using test::error_of;
using test::FakeGpu;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class Cuda : public ::testing::Test {
 protected:
  void TearDown() override {
    device_.reset();
    EXPECT_THAT(gpu_.violations(), IsEmpty());
    EXPECT_EQ(gpu_.living_streams(), 0U);
    EXPECT_EQ(gpu_.living_events(), 0U);
  }
  /// A kernel.
  void give(const Stream& stream, std::function<void()> task) { gpu_.enqueue(stream.native(), std::move(task)); }

  FakeGpu gpu_{2};
  detail::CudaTable cuda_ = gpu_.cuda_table();
  std::unique_ptr<Device> device_ = detail::make_cuda_device(cuda_, 1, Milliseconds{200});
};

TEST_F(Cuda, DeviceSaysWhatItIs) {
  EXPECT_EQ(device_->kind(), "cuda");
  EXPECT_TRUE(device_->asynchronous());
  EXPECT_EQ(device_->execution_mode(), ExecutionMode::kDevice);
  const Stream stream = device_->make_stream("gather");
  EXPECT_NE(stream.native(), nullptr);
  EXPECT_FALSE(stream.runs_inline());
  EXPECT_EQ(make_cpu_device()->make_stream("host").native(), nullptr);
}

TEST_F(Cuda, TasksRunAtOnceWithTheDeviceCurrent) {
  const Stream stream = device_->make_stream("s");
  int seen = -1;
  stream.enqueue([&] { (void)cuda_.get_device(&seen); });
  EXPECT_EQ(seen, 1);
  (void)cuda_.get_device(&seen);
  EXPECT_EQ(seen, 0) << "the caller's device is as it was";
}

TEST_F(Cuda, EventsComeWhenTheDeviceHasComeToThem) {
  const Stream stream = device_->make_stream("s");
  int value = 0;
  gpu_.hold(stream.native(), true);
  give(stream, [&] { value = 1; });
  const Event event = stream.record();
  give(stream, [&] { value = 2; });
  EXPECT_FALSE(event.ready());
  EXPECT_EQ(value, 0);
  gpu_.hold(stream.native(), false);
  EXPECT_TRUE(event.ready());
  event.wait();
  stream.synchronize();
  EXPECT_EQ(value, 2);
}

TEST_F(Cuda, AStreamIsOrderedAfterAnotherOnTheDevice) {  // whose event is free again once the wait is enqueued
  const Stream first = device_->make_stream("first");
  const Stream second = device_->make_stream("second");
  std::vector<int> order;
  gpu_.hold(first.native(), true);
  give(first, [&] { order.push_back(1); });
  second.order_after(first.record());
  give(second, [&] { order.push_back(2); });
  const Event end = second.record();
  EXPECT_FALSE(end.ready()) << "the host has not waited, the device does";
  gpu_.hold(first.native(), false);
  end.wait();
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_THAT(gpu_.log(1, {"event", "stream"}),
              ElementsAre("event_record e0 s0", "stream_wait s1 e0", "event_record e0 s1"));
}

TEST_F(Cuda, StreamsOfTheHostWaitOnTheHostAndTheOtherWayRound) {
  for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
    const auto cpu = make_cpu_device(mode, 3);
    const Stream host = cpu->make_stream("host");
    const Stream stream = device_->make_stream("s");
    int value = 0;
    int seen = -1;
    give(stream, [&] { value = 1; });
    host.order_after(stream.record());
    host.enqueue([&] { seen = value; });
    host.synchronize();
    EXPECT_EQ(seen, 1);
    host.enqueue([&] { value = 5; });
    stream.order_after(host.record());
    EXPECT_EQ(value, 5) << "what is given to the device now may use it";
  }
}

TEST_F(Cuda, ErrorsRestInTheNextEventAsOnTheHost) {
  const Stream stream = device_->make_stream("s");
  stream.enqueue([] { throw Error(ErrorCode::kUsage, "planted"); });
  bool ran = false;
  stream.enqueue([&] { ran = true; });
  EXPECT_FALSE(ran);
  const Event event = stream.record();
  const Stream other = device_->make_stream("other");
  other.order_after(event);
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { event.wait(); }), HasSubstr("planted"));
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { other.synchronize(); }), HasSubstr("planted"));
  EXPECT_NO_THROW(stream.synchronize());
}

TEST_F(Cuda, AWaitEndsAtTheDeadline) {
  const Stream stream = device_->make_stream("s");
  gpu_.hold(stream.native(), true);
  const Event event = stream.record();
  EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { event.wait(); }),
              AllOf(HasSubstr("within 200 ms"), HasSubstr("device 1")));
  gpu_.hold(stream.native(), false);
  EXPECT_NO_THROW(event.wait()) << "it may still come";
}

TEST_F(Cuda, AWaitLooksForInterrupts) {
  const Stream stream = device_->make_stream("s");
  gpu_.hold(stream.native(), true);
  const Event event = stream.record();
  set_interrupt_check([] { throw Error(ErrorCode::kAborted, "Ctrl-C"); });
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { event.wait(); }), HasSubstr("Ctrl-C"));
  set_interrupt_check(nullptr);
  gpu_.hold(stream.native(), false);
}

TEST_F(Cuda, AnErrorOfTheDeviceIsInTheWait) {
  const Stream stream = device_->make_stream("s");
  const Event event = stream.record();
  gpu_.event_status = 700;
  EXPECT_THAT(error_of(ErrorCode::kResource, [&] { event.wait(); }),
              AllOf(HasSubstr("error 700"), HasSubstr("CUDA_LAUNCH_BLOCKING")));
  gpu_.event_status = detail::kCudaSuccess;
}

TEST_F(Cuda, EventsAreUsedAgainAlsoWhileAStreamWaitsForThem) {
  const Stream first = device_->make_stream("first");
  const Stream second = device_->make_stream("second");
  gpu_.hold(first.native(), true);
  bool done = false;
  give(first, [&] { done = true; });
  second.order_after(first.record());  // the event goes back at once
  bool seen = false;
  give(second, [&] { seen = done; });
  const Stream third = device_->make_stream("third");
  third.synchronize();  // and is recorded elsewhere
  EXPECT_EQ(gpu_.living_events(), 1U);
  gpu_.hold(first.native(), false);
  second.synchronize();
  EXPECT_TRUE(seen);
}

TEST_F(Cuda, WorkGivenAfterTheDeviceWentIsAborted) {
  const Stream stream = device_->make_stream("s");
  const Event before = stream.record();
  device_.reset();
  stream.enqueue([] { FAIL() << "a task of a device that is gone"; });
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { stream.synchronize(); }), HasSubstr("the device was closed"));
}

TEST_F(Cuda, ArenasOfTheDeviceAreItsMemory) {
  {
    Arena arena = device_->make_arena(ArenaKind::kDevice, 1'000, "gradients");
    EXPECT_EQ(arena.kind(), ArenaKind::kDevice);
    EXPECT_EQ(arena.capacity(), 1'000U);
    EXPECT_EQ(arena.fd(), -1);
    detail::CudaPointer about;
    ASSERT_EQ(cuda_.pointer(&about, arena.data() + 999), detail::kCudaSuccess);
    EXPECT_EQ(about.type, detail::kCudaMemoryDevice);
    EXPECT_EQ(about.device, 1);
    const Buffer part = arena.allocate(512, {.state = MemoryState::kBucket}, device_->ledger(), 256);
    EXPECT_EQ(part.data(), arena.data());
    EXPECT_EQ(device_->ledger().live()[MemoryState::kBucket], 512U);
    EXPECT_THAT(error_of(ErrorCode::kInternal, [&] { (void)arena.reserve(512, 256); }),
                HasSubstr("an arena is smaller"));
  }
  EXPECT_EQ(device_->make_arena(ArenaKind::kDevice, 0, "none").capacity(), 0U);
  EXPECT_EQ(device_->make_arena(ArenaKind::kPrivate, 100, "host").kind(), ArenaKind::kPrivate);
  EXPECT_THAT(error_of(ErrorCode::kOutOfMemory,
                       [&] { (void)device_->make_arena(ArenaKind::kDevice, std::size_t{1} << 40U, "too much"); }),
              HasSubstr("CUDA refused 1.00 TiB for too much"));
}

TEST_F(Cuda, TheHostMakesNoMemoryOfADevice) {
  EXPECT_THAT(error_of(ErrorCode::kUsage, [] { (void)make_cpu_device()->make_arena(ArenaKind::kDevice, 10, "x"); }),
              HasSubstr("memory of a device is made by that device"));
  EXPECT_THAT(error_of(ErrorCode::kUsage, [] { (void)make_cpu_device(ExecutionMode::kDevice); }),
              HasSubstr("the CPU has no streams"));
}

TEST_F(Cuda, ADeviceThatIsNotThereIsRefused) {
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)detail::make_cuda_device(cuda_, 2, Milliseconds{1}); }),
              HasSubstr("expected: 0 to 1"));
  gpu_.count_status = detail::kCudaNoDevice;
  EXPECT_THAT(error_of(ErrorCode::kEnvironment, [&] { (void)detail::make_cuda_device(cuda_, 0, Milliseconds{1}); }),
              HasSubstr("there is no CUDA device"));
}

}  // namespace
}  // namespace zeroth
