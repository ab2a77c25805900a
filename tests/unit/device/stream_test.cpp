// What streams promise in both modes; chaos_order_test.cpp has what only chaos can show.
#include <zeroth/base/error.h>
#include <zeroth/device/device.h>

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth {
namespace {

class Streams : public ::testing::TestWithParam<ExecutionMode> {
 protected:
  std::unique_ptr<Device> device_ = make_cpu_device(GetParam(), 11);
};

INSTANTIATE_TEST_SUITE_P(Modes, Streams, ::testing::Values(ExecutionMode::kInline, ExecutionMode::kChaos),
                         [](const auto& instance) {
                           return instance.param == ExecutionMode::kInline ? "inline" : "chaos";
                         });

TEST_P(Streams, DeviceSaysWhatItIs) {
  EXPECT_EQ(device_->kind(), "cpu");
  EXPECT_EQ(device_->execution_mode(), GetParam());
  EXPECT_EQ(device_->asynchronous(), GetParam() == ExecutionMode::kChaos);
  const Stream stream = device_->make_stream("gather");
  EXPECT_EQ(stream.name(), "gather");
  EXPECT_EQ(stream.runs_inline(), GetParam() == ExecutionMode::kInline);
}

TEST_P(Streams, WaitRunsEverythingBefore) {
  const Stream stream = device_->make_stream("s");
  std::vector<int> seen;
  for (int task = 0; task < 20; ++task) stream.enqueue([&seen, task] { seen.push_back(task); });
  const Event event = stream.record();
  event.wait();
  EXPECT_TRUE(event.ready());
  ASSERT_EQ(seen.size(), 20U);
  for (int task = 0; task < 20; ++task) EXPECT_EQ(seen[static_cast<std::size_t>(task)], task);
}

/// The steps of a call over two levels, beside calls that were submitted after it and that wait for it.
TEST_P(Streams, WhatATaskSubmitsDoesNotWaitForWhatCameAfterTheTask) {
  const Stream first = device_->make_stream("first");
  const Stream second = device_->make_stream("second");
  const Stream nested = make_nested_stream("nested");
  std::string seen;
  Event last;
  first.enqueue([&] {
    nested.order_after(last);
    nested.enqueue([&] { seen += "a"; });
    nested.record().wait();
  });
  second.order_after(first.record());
  second.enqueue([&] { seen += "b"; });
  last = second.record();
  last.wait();
  EXPECT_EQ(seen, "ab");
  EXPECT_TRUE(nested.runs_inline());
}

TEST(NestedStreams, HandOnKnownErrors) {
  const std::unique_ptr<Device> device = make_cpu_device();
  const Stream failed = device->make_stream("failed");
  failed.enqueue([] { throw std::runtime_error("burst"); });
  const Stream nested = make_nested_stream("nested");
  nested.order_after(failed.record());
  bool ran = false;
  nested.enqueue([&] { ran = true; });
  EXPECT_THROW(nested.record().wait(), std::runtime_error);
  EXPECT_FALSE(ran);
}

TEST_P(Streams, EmptyEventsAndWorksAreComplete) {
  const Event event;
  EXPECT_TRUE(event.ready());
  EXPECT_NO_THROW(event.wait());
  const Work work;
  EXPECT_NO_THROW(work.wait());
  const Stream stream = device_->make_stream("s");
  stream.order_after(event);
  work.order_before(stream);
  EXPECT_NO_THROW(stream.synchronize());
}

TEST_P(Streams, AnErrorIsCarriedByTheNextEventOnly) {
  const Stream stream = device_->make_stream("s");
  bool behind = false;
  const Event before = stream.record();
  stream.enqueue([] { throw std::runtime_error("first"); });
  stream.enqueue([] { throw std::logic_error("second"); });
  stream.enqueue([&behind] { behind = true; });
  const Event carrier = stream.record();
  const Event later = stream.record();
  EXPECT_NO_THROW(before.wait());
  EXPECT_NO_THROW(later.wait());
  EXPECT_THROW(carrier.wait(), std::runtime_error);
  EXPECT_THROW(carrier.wait(), std::runtime_error) << "an event stays failed";
  EXPECT_FALSE(behind) << "nothing runs behind a failure";
  bool after = false;
  stream.enqueue([&after] { after = true; });
  EXPECT_NO_THROW(stream.synchronize());
  EXPECT_TRUE(after) << "the stream goes on";
}

TEST_P(Streams, SynchronizeThrowsOnce) {
  const Stream stream = device_->make_stream("s");
  stream.enqueue([] { throw Error(ErrorCode::kIo, "disk"); });
  EXPECT_THROW(stream.synchronize(), Error);
  EXPECT_NO_THROW(stream.synchronize());
}

TEST_P(Streams, AnErrorTravelsAlongOrderAfter) {
  const Stream first = device_->make_stream("first");
  const Stream second = device_->make_stream("second");
  bool ran = false;
  first.enqueue([] { throw std::runtime_error("lost gather"); });
  const Work work(first.record(), {.what = "gather", .bytes = 7});
  work.order_before(second);
  second.enqueue([&ran] { ran = true; });
  EXPECT_THROW(second.synchronize(), std::runtime_error);
  EXPECT_FALSE(ran) << "a task must not run on data that never came";
  EXPECT_THROW(work.wait(), std::runtime_error);
  EXPECT_EQ(work.info().what, "gather");
  EXPECT_EQ(work.info().bytes, 7U);
}

TEST_P(Streams, TasksMayUseOtherStreams) {
  const Stream outer = device_->make_stream("outer");
  const Stream inner = device_->make_stream("inner");
  std::string seen;
  outer.enqueue([&] {
    inner.enqueue([&seen] { seen += "i"; });
    inner.record().wait();
    seen += "o";
  });
  outer.enqueue([&seen] { seen += "O"; });
  outer.synchronize();
  EXPECT_EQ(seen, "ioO");
}

TEST_P(Streams, TasksMayMakeStreams) {
  // Many: whatever holds the streams of a device has to grow while a task of it is on the stack.
  const Stream stream = device_->make_stream("s");
  std::vector<Stream> made;
  stream.enqueue([&] {
    for (int index = 0; index < 200; ++index) made.push_back(device_->make_stream("made"));
    throw std::runtime_error("after all that");
  });
  EXPECT_THROW(stream.synchronize(), std::runtime_error);
  EXPECT_EQ(made.size(), 200U);
  for (const Stream& other : made) EXPECT_NO_THROW(other.synchronize());
}

TEST_P(Streams, TasksMayAddToTheirOwnStream) {
  const Stream stream = device_->make_stream("s");
  int ran = 0;
  stream.enqueue([&, stream] {
    ++ran;
    stream.enqueue([&ran] { ++ran; });
  });
  stream.synchronize();
  stream.synchronize();
  EXPECT_EQ(ran, 2);
}

TEST_P(Streams, OwnWhatTheyCaptureUntilRun) {
  const auto alive = std::make_shared<int>(1);
  const Stream stream = device_->make_stream("s");
  for (int task = 0; task < 8; ++task) stream.enqueue([alive] { EXPECT_EQ(*alive, 1); });
  stream.synchronize();
  EXPECT_EQ(alive.use_count(), 1);
}

TEST_P(Streams, EventsOutliveTheDevice) {
  Event done;
  {
    const Stream stream = device_->make_stream("s");
    stream.enqueue([] {});
    done = stream.record();
    done.wait();
  }
  device_.reset();
  EXPECT_TRUE(done.ready());
  EXPECT_NO_THROW(done.wait());
}

TEST_P(Streams, TwoDevicesShareNothing) {
  const auto other = make_cpu_device(GetParam(), 11);
  const Stream a = device_->make_stream("a");
  const Stream b = other->make_stream("b");
  a.enqueue([] { throw std::runtime_error("a"); });
  int ran = 0;
  b.enqueue([&ran] { ++ran; });
  EXPECT_NO_THROW(b.synchronize());
  EXPECT_EQ(ran, 1);
  EXPECT_THROW(a.synchronize(), std::runtime_error);
}

TEST(InlineStream, RunsBeforeEnqueueReturns) {
  const auto device = make_cpu_device();
  const Stream stream = device->make_stream("s");
  bool ran = false;
  stream.enqueue([&ran] { ran = true; });
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace zeroth
