// What a queue says of transfers that fail, and what probes find.
#include "io/engine.h"
#include "io/probe.h"
#include "io/request_queue.h"
#include "support/error_of.h"
#include "unit/io/io_support.h"

#include <zeroth/io/faults.h>

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Faults : public ::testing::Test {
 protected:
  std::unique_ptr<IoQueue> open(std::vector<IoFault> faults, Milliseconds timeout = Milliseconds{60'000}) {
    faults_ = std::make_shared<IoFaults>(std::move(faults));
    return open_io_queue(folder_.text(), {.depth = 4, .timeout = timeout, .faults = faults_});
  }
  /// One request a block.
  [[nodiscard]] std::vector<IoRequest> blocks(IoOp op) const {
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      requests.push_back({.op = op,
                          .file = file_,
                          .offset = i * kBlock,
                          .memory = memory_.bytes().subspan(i * kBlock, kBlock),
                          .name = "moments of layer " + std::to_string(i)});
    }
    return requests;
  }
  [[nodiscard]] IoRequest whole(IoOp op) const {
    return {.op = op, .file = file_, .memory = memory_.bytes(), .name = "all moments"};
  }

  static constexpr std::size_t kBlocks = 8;
  const TemporaryFolder folder_;
  const std::shared_ptr<const ScratchFile> file_ = ScratchFile::create(folder_.text(), kBlocks* kBlock);
  const detail::AlignedMemory memory_{kBlocks * kBlock};
  std::shared_ptr<IoFaults> faults_;
};

TEST_F(Faults, AFailureNamesRequestFileAndReasonAfterAllHaveEnded) {
  const auto queue = open({{.kind = IoFaultKind::kErrno, .at = 3, .error_number = EIO}});
  fill(memory_.bytes(), 1);
  const std::string text = error_of(ErrorCode::kIo, [&] { queue->submit(blocks(IoOp::kWrite)).wait(); });
  EXPECT_THAT(text,
              AllOf(HasSubstr("a write failed: Input/output error"), HasSubstr("moments of layer 2 in a "),
                    HasSubstr(folder_.text()), HasSubstr("4096 bytes at offset 8192"), HasSubstr("got: 0 bytes")));
  EXPECT_EQ(queue->pending(), 0U);
  const IoCounters counters = queue->counters();
  EXPECT_EQ(counters.requests, kBlocks);
  EXPECT_EQ(counters.failures, 1U);
  EXPECT_EQ(counters.bytes_written, (kBlocks - 1) * kBlock);
  queue->submit(blocks(IoOp::kRead)).wait();  // the queue goes on
}

TEST_F(Faults, NoSpaceIsAnErrorWithAHint) {
  const auto queue = open({{.kind = IoFaultKind::kErrno, .at = 1, .error_number = ENOSPC}});
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { queue->submit(blocks(IoOp::kWrite)).wait(); }),
              AllOf(HasSubstr("No space left on device"), HasSubstr("hint: the file system could not reserve")));
}

TEST_F(Faults, AShortTransferGoesOnWhereItEnded) {
  // 8 blocks, then 4, 2, 1, 1: each but the last is cut in half.
  const auto queue = open({{.kind = IoFaultKind::kShort, .probability = 1}});
  fill(memory_.bytes(), 2);
  const std::vector<std::byte> written(memory_.bytes().begin(), memory_.bytes().end());
  const IoRequest write = whole(IoOp::kWrite);
  queue->submit({&write, 1}).wait();
  EXPECT_EQ(queue->counters().resubmissions, 3U);
  EXPECT_EQ(queue->counters().bytes_written, kBlocks * kBlock);
  EXPECT_EQ(queue->counters().requests, 1U);
  fill(memory_.bytes(), 3);
  const IoRequest read = whole(IoOp::kRead);
  queue->submit({&read, 1}).wait();
  EXPECT_TRUE(std::ranges::equal(memory_.bytes(), written));
}

TEST_F(Faults, AFailureAfterAShortTransferSaysHowFarItCame) {
  const auto queue =
      open({{.kind = IoFaultKind::kShort, .at = 1}, {.kind = IoFaultKind::kErrno, .at = 2, .error_number = EIO}});
  const IoRequest read = whole(IoOp::kRead);
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { queue->submit({&read, 1}).wait(); }), HasSubstr("got: 16384 bytes"));
}

TEST_F(Faults, AFlippedBitIsSilent) {
  const auto differing = [&](const std::vector<std::byte>& expected) {
    int bits = 0;
    for (std::size_t i = 0; i < expected.size(); ++i)
      bits += std::popcount(static_cast<unsigned>(expected[i] ^ memory_.data()[i]));
    return bits;
  };
  const auto queue = open({{.kind = IoFaultKind::kFlip, .at = 1}, {.kind = IoFaultKind::kFlip, .at = 3}});
  fill(memory_.bytes(), 2);
  const std::vector<std::byte> written(memory_.bytes().begin(), memory_.bytes().end());
  const IoRequest write = whole(IoOp::kWrite);
  const IoRequest read = whole(IoOp::kRead);
  queue->submit({&write, 1}).wait();
  EXPECT_EQ(differing(written), 0);  // the caller's memory is only read
  queue->submit({&read, 1}).wait();
  EXPECT_EQ(differing(written), 1);
  queue->submit({&read, 1}).wait();
  EXPECT_THAT(differing(written), ::testing::AnyOf(0, 2));
  EXPECT_EQ(faults_->count(IoFaultKind::kFlip), 2U);
}

TEST_F(Faults, WhatIsPutOffForeverEndsAtTheDeadline) {
  for (const IoFault fault : {IoFault{.kind = IoFaultKind::kErrno, .probability = 1, .error_number = EAGAIN},
                              IoFault{.kind = IoFaultKind::kRefuse, .probability = 1}}) {
    const auto queue = open({fault}, Milliseconds{50});
    const Work work = queue->submit(blocks(IoOp::kRead));
    EXPECT_THAT(error_of(ErrorCode::kTimeout, [&] { work.wait(); }), HasSubstr("8 requests not finished"));
    faults_->stop();
    wait_patiently(work);
  }
}

TEST_F(Faults, ATransferThatMovesNothingIsNotTriedForever) {
  const auto queue = open({});
  const auto cut = ScratchFile::create(folder_.text(), 2 * kBlock);
  ASSERT_EQ(::ftruncate(cut->descriptor(), kBlock), 0);
  const IoRequest read{.file = cut, .memory = memory_.bytes().first(2 * kBlock), .name = "moments"};
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { queue->submit({&read, 1}).wait(); }),
              AllOf(HasSubstr("a read moves no whole block"), HasSubstr("8192 bytes"), HasSubstr("got: 4096 bytes")));
}

TEST_F(Faults, AProbeFindsWhatDoesNotReadBack) {
  for (const std::uint64_t transfer : {1U, 8U, 9U, 16U}) {
    const auto faults = std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kFlip, .at = transfer}});
    const IoQueueOptions options{.depth = 4};
    const auto queue =
        detail::make_request_queue(detail::make_faulty_engine(detail::make_thread_engine(4, 1), faults), options, "");
    EXPECT_THAT(error_of(ErrorCode::kIo, [&] { detail::probe_queue(*queue, file_); }),
                AllOf(HasSubstr("what was written does not read back"), HasSubstr("expected: byte ")));
    detail::probe_queue(*queue, file_);
  }
}

TEST(LongRequests, OneThatIsLongerThanATransferOfTheKernelIsMovedInParts) {
  const TemporaryFolder folder;
  constexpr std::size_t kBytes = detail::kLongestTransfer + 2 * kBlock;
  const auto file = ScratchFile::create(folder.text(), kBytes);
  const detail::AlignedMemory memory(kBytes);
  std::memset(memory.data(), 7, kBytes);
  fill(memory.bytes().last(3 * kBlock), 5);
  const std::vector<std::byte> end(memory.bytes().end() - 3 * kBlock, memory.bytes().end());
  const auto queue = open_io_queue(folder.text());
  const IoRequest write{.op = IoOp::kWrite, .file = file, .memory = memory.bytes(), .name = "long"};
  queue->submit({&write, 1}).wait();
  std::memset(memory.data(), 0, kBytes);
  const IoRequest read{.file = file, .memory = memory.bytes(), .name = "long"};
  queue->submit({&read, 1}).wait();
  EXPECT_TRUE(std::ranges::equal(memory.bytes().last(3 * kBlock), end));
  EXPECT_EQ(std::ranges::count(memory.bytes().first(kBytes - 3 * kBlock), std::byte{7}),
            static_cast<std::ptrdiff_t>(kBytes - 3 * kBlock));
}

}  // namespace
}  // namespace zeroth::test
