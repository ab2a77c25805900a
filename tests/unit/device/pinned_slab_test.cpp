// Staging memory, on a fake of CUDA.
#include "device/cuda/pinned_slab.h"

#include "device/cuda/event_cache.h"
#include "support/error_of.h"
#include "support/fake_gpu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::detail {
namespace {

using test::error_of;
using test::FakeGpu;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Pinned : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(cuda_.stream_create(&stream_, kCudaStreamNonBlocking), kCudaSuccess); }
  void TearDown() override {
    (void)cuda_.stream_destroy(stream_);
    slab_.reset();
    EXPECT_EQ(ledger_->live().total(), 0U);
    EXPECT_THAT(gpu_.violations(), IsEmpty());
  }
  std::shared_ptr<void> record() {
    std::shared_ptr<void> event = events_->take();
    (void)cuda_.event_record(event.get(), stream_);
    return event;
  }

  FakeGpu gpu_{1};
  CudaTable cuda_ = gpu_.cuda_table();
  std::shared_ptr<MemoryLedger> ledger_ = MemoryLedger::create();
  std::shared_ptr<EventCache> events_ = std::make_shared<EventCache>(cuda_, 0, "test");
  std::shared_ptr<PinnedSlab> slab_ = PinnedSlab::create(cuda_, 0, 1'000, *ledger_);
  void* stream_ = nullptr;
};

TEST_F(Pinned, IsCountedAndHandedOutInGrains) {
  EXPECT_EQ(slab_->capacity(), 1'024U);
  EXPECT_EQ(ledger_->live()[MemoryState::kControl], 1'024U);
  const auto a = slab_->take(1, Milliseconds{0});
  const auto b = slab_->take(257, Milliseconds{0});
  EXPECT_EQ(a.bytes().size(), 256U);
  EXPECT_EQ(b.bytes().size(), 512U);
  EXPECT_EQ(b.data(), a.data() + 256);
  EXPECT_EQ(slab_->free_bytes(), 256U);
  EXPECT_TRUE(slab_->take(0, Milliseconds{0}).bytes().empty());
}

TEST_F(Pinned, NeighboursBecomeOnePlaceAgain) {
  std::vector<PinnedSlab::Block> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(slab_->take(256, Milliseconds{0}));
  for (const std::size_t index : {0U, 2U}) blocks[index].give_back();
  EXPECT_EQ(slab_->free_bytes(), 512U);
  EXPECT_EQ(slab_->largest_free(), 256U);
  blocks[1].give_back();
  EXPECT_EQ(slab_->largest_free(), 768U);
  blocks[3].give_back();
  EXPECT_EQ(slab_->largest_free(), 1'024U);
  blocks[3].give_back();  // again is nothing
  EXPECT_EQ(slab_->free_bytes(), 1'024U);
}

TEST_F(Pinned, ABlockUnderACopyComesBackWhenTheDeviceIsDone) {
  auto block = slab_->take(1'024, Milliseconds{0});
  const std::byte* const place = block.data();
  gpu_.hold(stream_, true);
  block.give_back_after(record());
  EXPECT_TRUE(block.bytes().empty());
  EXPECT_EQ(slab_->free_bytes(), 0U);
  EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { (void)slab_->take(256, Milliseconds{20}); }),
              HasSubstr("within 20 ms"));
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gpu_.hold(stream_, false);
  });
  const auto again = slab_->take(256, Milliseconds{10'000});
  EXPECT_EQ(again.data(), place);
  device.join();
  EXPECT_EQ(events_->idle(), 1U) << "its event is free as well";
}

TEST_F(Pinned, WhatSomebodyHoldsIsNotWaitedFor) {
  const auto held = slab_->take(900, Milliseconds{0});
  EXPECT_THAT(error_of(ErrorCode::kOutOfMemory, [&] { (void)slab_->take(256, Milliseconds{60'000}); }),
              HasSubstr("none of it is on its way back"));
  EXPECT_THAT(error_of(ErrorCode::kInternal, [&] { (void)slab_->take(1'025, Milliseconds{0}); }),
              HasSubstr("at most 1.00 KiB"));
}

TEST_F(Pinned, BlocksMoveAndKeepTheSlab) {
  auto block = slab_->take(300, Milliseconds{0});
  auto other = std::move(block);
  EXPECT_TRUE(block.bytes().empty());  // NOLINT(bugprone-use-after-move)
  other = slab_->take(100, Milliseconds{0});
  EXPECT_EQ(slab_->free_bytes(), 768U) << "the first one went back";
  slab_.reset();
  EXPECT_EQ(ledger_->live().total(), 1'024U);
  other.data()[99] = std::byte{1};
}

TEST_F(Pinned, AnErrorOfTheDeviceIsSaid) {
  auto block = slab_->take(1'024, Milliseconds{0});
  block.give_back_after(record());
  gpu_.event_status = 700;
  EXPECT_THAT(error_of(ErrorCode::kResource, [&] { (void)slab_->take(256, Milliseconds{0}); }), HasSubstr("error 700"));
  gpu_.event_status = kCudaSuccess;
}

TEST_F(Pinned, TooMuchIsOutOfMemory) {
  EXPECT_THAT(
      error_of(ErrorCode::kOutOfMemory, [&] { (void)PinnedSlab::create(cuda_, 0, std::size_t{1} << 40U, *ledger_); }),
      HasSubstr("1.00 TiB of pinned memory"));
  EXPECT_EQ(ledger_->live().total(), 1'024U);
}

}  // namespace
}  // namespace zeroth::detail
