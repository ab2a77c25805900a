// Scratch files: size, access, what is left of them; and stripes over several.
#include "support/error_of.h"
#include "support/own_file_system.h"
#include "unit/io/io_support.h"

#include <zeroth/io/striped_file.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> first_block(const ScratchFile& file) {
  const detail::AlignedMemory memory(file.alignment(), file.alignment());
  fill(memory.bytes(), 3);
  EXPECT_EQ(::pread(file.descriptor(), memory.data(), file.alignment(), 0), static_cast<ssize_t>(file.alignment()));
  return {memory.bytes().begin(), memory.bytes().end()};
}

TEST(ScratchFile, ItsSizeIsRoundedUpToBlocksAndItReadsZeros) {
  const TemporaryFolder folder;
  const auto file = ScratchFile::create(folder.text(), 3 * kBlock + 1);
  EXPECT_TRUE(std::has_single_bit(file->alignment()));
  EXPECT_GE(file->alignment(), kBlock);
  EXPECT_EQ(file->bytes() % file->alignment(), 0U);
  EXPECT_GE(file->bytes(), 3 * kBlock + 1);
  struct stat facts{};
  ASSERT_EQ(::fstat(file->descriptor(), &facts), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(facts.st_size), file->bytes());
  EXPECT_GE(static_cast<std::uint64_t>(facts.st_blocks) * 512, file->reserved() ? file->bytes() : 0);
  EXPECT_EQ(first_block(*file), std::vector<std::byte>(file->alignment()));  // the probe has left nothing
  EXPECT_EQ(file->access() == FileAccess::kDirect, file->reason().empty());
}

TEST(ScratchFile, ADirectOneHasTheFlagAndABufferedOneHasNot) {
  const TemporaryFolder folder;
  const auto is_direct = [](const ScratchFile& file) { return (::fcntl(file.descriptor(), F_GETFL) & O_DIRECT) != 0; };
  const auto wished = ScratchFile::create(folder.text(), kBlock);
  EXPECT_EQ(is_direct(*wished), wished->access() == FileAccess::kDirect) << wished->reason();
  const auto buffered = ScratchFile::create(folder.text(), kBlock, {.access = FileAccess::kBuffered});
  EXPECT_FALSE(is_direct(*buffered));
  EXPECT_EQ(buffered->access(), FileAccess::kBuffered);
  EXPECT_EQ(buffered->reason(), "");
}

TEST(ScratchFile, WhereDirectIsRefusedItIsBufferedAndSaysWhy) {
  const TemporaryFolder folder;
  const Armed armed("io.direct:errno=EINVAL");
  const auto file = ScratchFile::create(folder.text(), kBlock);
  EXPECT_EQ(file->access(), FileAccess::kBuffered);
  EXPECT_THAT(file->reason(), HasSubstr("O_DIRECT: Invalid argument"));
}

TEST(ScratchFile, WhereNothingCanBeReservedItSaysSo) {
  const TemporaryFolder folder;
  const Armed armed("io.reserve:errno=EOPNOTSUPP");
  const auto file = ScratchFile::create(folder.text(), 2 * kBlock);
  EXPECT_FALSE(file->reserved());
  EXPECT_EQ(first_block(*file), std::vector<std::byte>(file->alignment()));
}

TEST(ScratchFile, ItHasNoNameInItsFolder) {
  const TemporaryFolder folder;
  const auto unnamed = ScratchFile::create(folder.text(), kBlock);
  EXPECT_TRUE(folder.empty());
  const Armed armed("io.tmpfile:errno=EOPNOTSUPP");  // as on NFS
  const auto unlinked = ScratchFile::create(folder.text(), kBlock);
  EXPECT_TRUE(folder.empty());
  EXPECT_EQ(first_block(*unlinked), std::vector<std::byte>(unlinked->alignment()));
}

TEST(ScratchFile, KillingItsProcessLeavesNothing) {
  for (const char* spec : {"io.direct@hit=99:throw", "io.tmpfile:errno=EOPNOTSUPP"}) {
    const TemporaryFolder folder;
    const Armed armed(spec);
    const pid_t child = ::fork();
    if (child == 0) {
      const auto file = ScratchFile::create(folder.text(), 4 * kBlock);
      ::raise(SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    EXPECT_TRUE(folder.empty()) << spec;
  }
}

TEST(ScratchFile, ImpossibleSizesAndFoldersAreRefused) {
  const TemporaryFolder folder;
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)ScratchFile::create(folder.text(), 0); }), HasSubstr("got: 0"));
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)ScratchFile::create(folder.text(), std::uint64_t{1} << 63U); }),
              HasSubstr("1 to 2^62 bytes"));
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { (void)ScratchFile::create(folder.text() + "/none", kBlock); }),
              ::testing::AllOf(HasSubstr("No such file"), HasSubstr("/none")));
}

TEST(ScratchFile, AFullFileSystemIsAnErrorWithWantedAndFreeBytes) {
  const std::string problem = on_own_file_system(FileSystemKind::kTmpfs, 1U << 20U, [](const std::string& folder) {
    const auto first = ScratchFile::create(folder, 64 * kBlock);
    const std::string text =
        error_of(ErrorCode::kIo, [&] { (void)ScratchFile::create(folder, std::size_t{2} << 20U); });
    EXPECT_THAT(text, HasSubstr("No space left on device"));
    EXPECT_THAT(text, HasSubstr("which: " + folder));
    EXPECT_THAT(text, HasSubstr("2.00 MiB (2097152 bytes) free"));
    EXPECT_THAT(text, HasSubstr("got: 768.0 KiB free"));
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

TEST(ScratchFile, AFileSystemThatFillsUpLaterFailsTheWrite) {
  const std::string problem = on_own_file_system(FileSystemKind::kTmpfs, 1U << 20U, [](const std::string& folder) {
    const Armed armed("io.reserve:errno=EOPNOTSUPP");
    const auto file = ScratchFile::create(folder, std::size_t{2} << 20U);
    const auto queue = open_io_queue(folder, {.engine = IoEngineKind::kThreads});
    const detail::AlignedMemory memory(std::size_t{2} << 20U);
    std::memset(memory.data(), 1, memory.bytes().size());
    const IoRequest write{.op = IoOp::kWrite, .file = file, .memory = memory.bytes(), .name = "moments"};
    const std::string text = error_of(ErrorCode::kIo, [&] { queue->submit({&write, 1}).wait(); });
    EXPECT_THAT(text, HasSubstr("No space left on device"));
    EXPECT_THAT(text, HasSubstr("moments"));
    EXPECT_GT(queue->counters().bytes_written, 0U);  // what there was room for
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

TEST(ScratchFile, ADiskThatGoesAwayFailsEveryTransferByName) {
  const std::string problem = on_own_file_system(FileSystemKind::kExt4, 16U << 20U, [](const std::string& folder) {
    std::vector<std::unique_ptr<IoQueue>> queues;
    for (const IoEngineKind engine : {IoEngineKind::kAuto, IoEngineKind::kAio, IoEngineKind::kThreads}) {
      std::string why;
      if (auto queue = try_open(folder, {.engine = engine}, why)) queues.push_back(std::move(queue));
    }
    const auto file = ScratchFile::create(folder, 4 * kBlock);
    const detail::AlignedMemory memory(kBlock);
    const auto move = [&](IoQueue& queue, IoOp op) {
      const IoRequest request{.op = op, .file = file, .offset = kBlock, .memory = memory.bytes(), .name = "moments"};
      queue.submit({&request, 1}).wait();
    };
    for (const auto& queue : queues) move(*queue, IoOp::kWrite);
    ASSERT_TRUE(shut_down_ext4(folder));
    for (const auto& queue : queues) {
      for (const IoOp op : {IoOp::kRead, IoOp::kWrite})
        EXPECT_THAT(error_of(ErrorCode::kIo, [&] { move(*queue, op); }),
                    ::testing::AllOf(HasSubstr("Input/output error"), HasSubstr(folder), HasSubstr("moments")));
    }
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

std::vector<std::string> folders_of(std::span<const TemporaryFolder> folders) {
  std::vector<std::string> names;
  for (const TemporaryFolder& folder : folders) names.push_back(folder.text());
  return names;
}

TEST(StripedFile, EveryByteHasItsPlace) {
  const TemporaryFolder folders[3];
  const auto names = folders_of(folders);
  constexpr std::size_t kStripe = 2 * kBlock;
  for (const std::size_t first : {0U, 1U, 5U}) {
    const StripedFile striped =
        StripedFile::create(names, 9 * kStripe + 1, {.stripe_bytes = kStripe, .first_folder = first});
    ASSERT_EQ(striped.bytes(), 10 * kStripe);
    const std::size_t all = striped.bytes() / kBlock;
    const detail::AlignedMemory memory(striped.bytes());
    for (std::size_t begin = 0; begin < all; ++begin) {
      for (std::size_t end = begin; end <= all; ++end) {
        const auto part = memory.bytes().subspan(begin * kBlock, (end - begin) * kBlock);
        std::size_t block = begin;
        for (const IoRequest& request : striped.requests(IoOp::kRead, begin * kBlock, part, "x")) {
          ASSERT_EQ(request.memory.data(), memory.data() + block * kBlock);
          for (std::size_t at = 0; at < request.memory.size(); at += kBlock, ++block) {
            const std::size_t stripe = block / 2;
            ASSERT_EQ(request.file, striped.files()[(stripe + first) % 3]);
            ASSERT_EQ(request.offset + at, (stripe / 3 * 2 + block % 2) * kBlock);
            ASSERT_LE(request.offset + at + kBlock, request.file->bytes());
          }
        }
        ASSERT_EQ(block, end);
      }
    }
  }
}

TEST(StripedFile, WhatIsWrittenReadsBackInOtherPortions) {
  const TemporaryFolder folders[3];
  const auto names = folders_of(folders);
  const StripedFile striped = StripedFile::create(names, 30 * kBlock, {.stripe_bytes = 2 * kBlock, .first_folder = 2});
  const auto queue = open_io_queue(names.front());
  const detail::AlignedMemory written(striped.bytes());
  const detail::AlignedMemory read(striped.bytes());
  fill(written.bytes(), 7);
  queue->submit(striped.requests(IoOp::kWrite, 0, written.bytes(), "all")).wait();
  for (std::size_t begin = 0, blocks = 1; begin < 30; begin += blocks++) {
    blocks = std::min(blocks, 30 - begin);
    queue
        ->submit(
            striped.requests(IoOp::kRead, begin * kBlock, read.bytes().subspan(begin * kBlock, blocks * kBlock), "a"))
        .wait();
  }
  EXPECT_TRUE(std::ranges::equal(written.bytes(), read.bytes()));
}

TEST(StripedFile, RangesAndStripesThatDoNotFitAreRefused) {
  const TemporaryFolder folders[1];
  const auto names = folders_of(folders);
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)StripedFile::create(names, 1, {.stripe_bytes = 1000}); }),
              HasSubstr("a multiple of 4096 bytes"));
  EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)StripedFile::create({}, 1); }), HasSubstr("without a folder"));
  const StripedFile striped = StripedFile::create(names, 4 * kBlock, {.stripe_bytes = kBlock});
  const detail::AlignedMemory memory(8 * kBlock);
  const auto ask = [&](std::uint64_t offset, std::size_t bytes) {
    return error_of(ErrorCode::kUsage,
                    [&] { (void)striped.requests(IoOp::kRead, offset, memory.bytes().first(bytes), "master"); });
  };
  EXPECT_THAT(ask(kBlock, 4 * kBlock), HasSubstr("which: master"));
  EXPECT_THAT(ask(100, kBlock), HasSubstr("4096 bytes at offset 100"));
  EXPECT_THAT(ask(0, 100), HasSubstr("100 bytes at offset 0"));
  EXPECT_THAT(ask(~std::uint64_t{0} - kBlock + 1, 2 * kBlock), HasSubstr("within 16384"));
}

}  // namespace
}  // namespace zeroth::test
