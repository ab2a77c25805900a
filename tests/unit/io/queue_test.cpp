// Every engine, on direct and on buffered files: the same results, waits, refusals.
#include "support/error_of.h"
#include "support/tier.h"
#include "unit/io/io_support.h"

#include <zeroth/device/device.h>
#include <zeroth/io/faults.h>

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

struct Setup {
  IoEngineKind engine = IoEngineKind::kThreads;
  FileAccess access = FileAccess::kDirect;
  bool one_thread = false;
};

std::string text_of(const ::testing::TestParamInfo<Setup>& info) {
  return std::string(name_of(info.param.engine)) + "_" + std::string(name_of(info.param.access)) +
         (info.param.one_thread ? "_one_thread" : "");
}

class Queue : public ::testing::TestWithParam<Setup> {
 protected:
  [[nodiscard]] static IoQueueOptions options(int depth = 8) {
    return {.engine = GetParam().engine, .depth = depth, .one_thread = GetParam().one_thread};
  }
  [[nodiscard]] std::shared_ptr<const ScratchFile> file(std::size_t blocks) const {
    return ScratchFile::create(folder_.text(), blocks * kBlock, {.access = GetParam().access});
  }
  /// The failpoint at which this engine takes new transfers.
  [[nodiscard]] static std::string submit_site() {
    return GetParam().engine == IoEngineKind::kThreads ? "io.threads.transfer"
                                                       : "io." + std::string(name_of(GetParam().engine)) + ".submit";
  }
  const TemporaryFolder folder_;
};

/// Batches of disjoint reads and writes, several in flight, beside an array that has what the file should.
void expect_like_an_array(IoQueue& queue, const std::shared_ptr<const ScratchFile>& file, std::uint64_t seed,
                          int rounds) {
  const std::size_t blocks = file->bytes() / kBlock;
  std::vector<std::byte> expected(file->bytes());
  const detail::AlignedMemory memory(file->bytes());
  std::mt19937_64 random(seed);
  for (int round = 0; round < rounds; ++round) {
    std::vector<IoRequest> requests;
    std::vector<Work> works;
    for (std::size_t block = random() % 3; block < blocks;) {
      const std::size_t length = std::min<std::size_t>(1 + random() % 5, blocks - block);
      const auto part = memory.bytes().subspan(block * kBlock, length * kBlock);
      const IoOp op = random() % 2 == 0 ? IoOp::kRead : IoOp::kWrite;
      fill(part, random());
      if (op == IoOp::kWrite) std::ranges::copy(part, expected.begin() + static_cast<std::ptrdiff_t>(block * kBlock));
      requests.push_back({.op = op, .file = file, .offset = block * kBlock, .memory = part, .name = "part"});
      if (random() % 4 == 0) works.push_back(queue.submit(std::exchange(requests, {})));
      if (random() % 4 == 0) queue.progress();
      block += length + random() % 3;
    }
    std::vector<IoRequest> last = std::exchange(requests, {});
    works.push_back(queue.submit(last));
    std::ranges::shuffle(works, random);
    for (const Work& work : works) work.wait();
    ASSERT_EQ(queue.pending(), 0U);
    const IoRequest whole{.op = IoOp::kRead, .file = file, .memory = memory.bytes(), .name = "all"};
    queue.submit({&whole, 1}).wait();
    ASSERT_TRUE(std::ranges::equal(memory.bytes(), expected)) << "seed " << seed << " round " << round;
  }
}

TEST_P(Queue, RandomOperationsEqualAnArray) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  EXPECT_EQ(queue->name(), name_of(GetParam().engine));
  expect_like_an_array(*queue, file(64), 11, in_long_tier() ? 400 : 8);
  EXPECT_LE(queue->counters().peak_in_flight, 8U);
  EXPECT_EQ(queue->counters().failures, 0U);
}

TEST_P(Queue, FaultsThatAreMadeGoodAreNotSeen) {
  for (std::uint64_t seed = 1; seed <= (in_long_tier() ? 100U : 2U); ++seed) {
    IoQueueOptions with = options();
    with.faults = std::make_shared<IoFaults>(
        std::vector<IoFault>{{.kind = IoFaultKind::kShort, .probability = 0.2},
                             {.kind = IoFaultKind::kRefuse, .probability = 0.1},
                             {.kind = IoFaultKind::kErrno, .probability = 0.1, .error_number = EAGAIN},
                             {.kind = IoFaultKind::kErrno, .probability = 0.1, .error_number = EINTR},
                             {.kind = IoFaultKind::kDelay, .probability = 0.02, .delay = Milliseconds{2}}},
        seed);
    ZR_OPEN_OR_SKIP(queue, folder_.text(), with);
    expect_like_an_array(*queue, file(48), seed, 4);
    EXPECT_GT(with.faults->count(IoFaultKind::kShort), 0U);
    EXPECT_GT(with.faults->count(IoFaultKind::kRefuse), 0U);
    EXPECT_GE(queue->counters().resubmissions, with.faults->count(IoFaultKind::kErrno));
    EXPECT_EQ(queue->counters().failures, 0U);
  }
}

TEST_P(Queue, MoreRequestsThanPlacesAreTakenInTurn) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options(3));
  const auto where = file(20);
  const detail::AlignedMemory memory(20 * kBlock);
  fill(memory.bytes(), 5);
  std::vector<IoRequest> requests;
  for (std::size_t i = 0; i < 20; ++i) {
    requests.push_back({.op = IoOp::kWrite,
                        .file = where,
                        .offset = i * kBlock,
                        .memory = memory.bytes().subspan(i * kBlock, kBlock),
                        .name = "block"});
  }
  const Work work = queue->submit(requests);
  EXPECT_EQ(work.info().bytes, 20 * kBlock);
  work.wait();
  const IoCounters counters = queue->counters();
  EXPECT_EQ(counters.requests, 20U);
  EXPECT_EQ(counters.bytes_written, 20 * kBlock);
  EXPECT_EQ(counters.bytes_read, 0U);
  EXPECT_EQ(counters.peak_in_flight, 3U);
}

TEST_P(Queue, WhatTheKernelPutsOffIsSubmittedAgain) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  const auto where = file(4);
  const detail::AlignedMemory memory(4 * kBlock);
  fill(memory.bytes(), 9);
  const bool threads = GetParam().engine == IoEngineKind::kThreads;
  const Armed armed(submit_site() + "@hit=1:errno=" + (threads ? "EINTR" : "EAGAIN"));
  const IoRequest write{.op = IoOp::kWrite, .file = where, .memory = memory.bytes(), .name = "block"};
  queue->submit({&write, 1}).wait();
  std::vector<std::byte> expected(memory.bytes().begin(), memory.bytes().end());
  fill(memory.bytes(), 10);
  const IoRequest read{.op = IoOp::kRead, .file = where, .memory = memory.bytes(), .name = "block"};
  queue->submit({&read, 1}).wait();
  EXPECT_TRUE(std::ranges::equal(memory.bytes(), expected));
  // What has a place in a ring of io_uring is taken, and handed on later.
  const bool ring = GetParam().engine == IoEngineKind::kIoUring;
  EXPECT_EQ(queue->counters().resubmissions, ring ? 0U : 1U);
}

TEST_P(Queue, RequestsThatDoNotFitAreRefusedBeforeAnyStarts) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  const auto where = file(4);
  const detail::AlignedMemory memory(8 * kBlock);
  const auto refused = [&](IoRequest bad) {
    bad.name = "moments";
    const IoRequest requests[] = {{.op = IoOp::kWrite, .file = where, .memory = memory.bytes().first(kBlock)}, bad};
    std::string text = error_of(ErrorCode::kUsage, [&] { (void)queue->submit(requests); });
    EXPECT_THAT(text, HasSubstr("which: moments"));
    return text;
  };
  const auto part = [&](std::size_t at, std::size_t bytes) { return memory.bytes().subspan(at, bytes); };
  EXPECT_THAT(refused({.file = where, .memory = part(1, kBlock)}), HasSubstr("is not aligned"));
  EXPECT_THAT(refused({.file = where, .memory = part(0, 100)}), HasSubstr("100 bytes at offset 0"));
  EXPECT_THAT(refused({.file = where, .offset = 512, .memory = part(0, kBlock)}), HasSubstr("multiples of 4096 bytes"));
  EXPECT_THAT(refused({.file = where, .offset = kBlock, .memory = part(0, 4 * kBlock)}), HasSubstr("leaves its file"));
  EXPECT_THAT(refused({.file = where, .offset = ~std::uint64_t{0} - kBlock + 1, .memory = part(0, kBlock)}),
              HasSubstr("within 16384 bytes"));
  EXPECT_THAT(refused({.file = where}), HasSubstr("without memory"));
  EXPECT_THAT(refused({.memory = part(0, kBlock)}), HasSubstr("without a file"));
  EXPECT_EQ(queue->pending(), 0U);
  EXPECT_EQ(queue->counters(), IoCounters{});
}

TEST_P(Queue, ProgressAloneBringsWorkToItsEnd) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options(2));
  const auto where = file(16);
  const detail::AlignedMemory memory(16 * kBlock);
  std::vector<IoRequest> requests;
  for (std::size_t i = 0; i < 16; ++i) {
    requests.push_back({.file = where, .offset = i * kBlock, .memory = memory.bytes().subspan(i * kBlock, kBlock)});
  }
  const Work work = queue->submit(requests);
  const Deadline deadline(Milliseconds{20'000});
  while (queue->pending() > 0 && !deadline.passed()) queue->progress();
  EXPECT_EQ(queue->pending(), 0U);
  EXPECT_TRUE(work.event().ready());
}

TEST_P(Queue, WorkBehindARequestWaitsForIt) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  const auto where = file(2);
  const detail::AlignedMemory memory(2 * kBlock);
  for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
    fill(memory.bytes(), 4);
    const auto device = make_cpu_device(mode, 3);
    const Stream stream = device->make_stream("behind");
    const IoRequest read{.file = where, .memory = memory.bytes(), .name = "block"};
    queue->submit({&read, 1}).order_before(stream);
    bool zeros = false;
    stream.enqueue(
        [&] { zeros = std::ranges::all_of(memory.bytes(), [](std::byte byte) { return byte == std::byte{}; }); });
    stream.synchronize();
    EXPECT_TRUE(zeros);
  }
}

TEST_P(Queue, AForkedChildIsRefusedAndTheParentGoesOn) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  const auto where = file(2);
  const detail::AlignedMemory memory(2 * kBlock);
  const IoRequest read{.file = where, .memory = memory.bytes(), .name = "block"};
  const Work before = queue->submit({&read, 1});
  const pid_t child = ::fork();
  if (child == 0) {
    int refusals = 0;
    const auto count = [&](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        refusals += error.code() == ErrorCode::kUsage ? 1 : 0;
      }
    };
    count([&] { (void)queue->submit({&read, 1}); });
    count([&] { queue->progress(); });
    count([&] { before.wait(); });
    queue.reset();
    ::_exit(refusals);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
  before.wait();
  queue->submit({&read, 1}).wait();
}

TEST_P(Queue, AnotherThreadUsesItUnlessOneThreadWasPromised) {
  ZR_OPEN_OR_SKIP(queue, folder_.text(), options());
  const auto where = file(2);
  const detail::AlignedMemory memory(2 * kBlock);
  const IoRequest read{.file = where, .memory = memory.bytes(), .name = "block"};
  std::string refusal;
  std::thread([&] {
    try {
      queue->submit({&read, 1}).wait();
    } catch (const Error& error) {
      refusal = error.what();
    }
  }).join();
  EXPECT_THAT(refusal, HasSubstr(GetParam().one_thread ? "a queue of one thread" : ""));
  EXPECT_EQ(refusal.empty(), !GetParam().one_thread);
  queue->submit({&read, 1}).wait();
}

TEST_P(Queue, ItsEndWaitsForWhatIsOnItsWay) {
  IoQueueOptions with = options(1);
  with.faults = std::make_shared<IoFaults>(
      std::vector<IoFault>{{.kind = IoFaultKind::kDelay, .at = 1, .delay = Milliseconds{100}}});
  ZR_OPEN_OR_SKIP(queue, folder_.text(), with);
  const auto where = file(2);
  const detail::AlignedMemory memory(2 * kBlock);
  fill(memory.bytes(), 4);
  const IoRequest reads[] = {{.file = where, .memory = memory.bytes().first(kBlock), .name = "first"},
                             {.file = where, .memory = memory.bytes().last(kBlock), .name = "second"}};
  const Work first = queue->submit({reads, 1});
  const Work second = queue->submit({reads + 1, 1});
  const auto begin = SteadyClock::now();
  queue.reset();
  EXPECT_GE(SteadyClock::now() - begin, Milliseconds{100});
  EXPECT_EQ(memory.data()[0], std::byte{});
  first.wait();
  EXPECT_THAT(error_of(ErrorCode::kAborted, [&] { second.wait(); }), HasSubstr("second"));
}

TEST_P(Queue, AWaitHasADeadlineAndMayBeRepeated) {
  IoQueueOptions with = options(2);
  with.timeout = Milliseconds{50};
  with.faults = std::make_shared<IoFaults>(
      std::vector<IoFault>{{.kind = IoFaultKind::kDelay, .at = 1, .delay = Milliseconds{150}}});
  ZR_OPEN_OR_SKIP(queue, folder_.text(), with);
  const auto where = file(2);
  const detail::AlignedMemory memory(2 * kBlock);
  fill(memory.bytes(), 4);
  const IoRequest read{.file = where, .offset = kBlock, .memory = memory.bytes().first(kBlock), .name = "moments"};
  const Work work = queue->submit({&read, 1});
  const std::string text = error_of(ErrorCode::kTimeout, [&] { work.wait(); });
  EXPECT_THAT(text, HasSubstr("read of moments in a "));
  EXPECT_THAT(text, HasSubstr("4096 bytes at offset 4096"));
  EXPECT_THAT(text, HasSubstr("within 50 ms"));
  EXPECT_FALSE(work.event().ready());
  wait_patiently(work);
  EXPECT_EQ(memory.data()[0], std::byte{});
}

TEST_P(Queue, AWaitLooksAroundAndMayBeEnded) {
  constexpr Milliseconds kDelay{300};
  IoQueueOptions with = options(2);
  int looks = -1;  // not before the queue is open
  with.watch = [&looks] {
    if (looks >= 0 && ++looks == 2) throw Error(ErrorCode::kPeerLost, "rank 1 is gone");
  };
  with.faults =
      std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kDelay, .at = 1, .delay = kDelay}});
  bool slept = true;  // a machine that stands still meanwhile lets the transfer end before anybody has looked
  for (int attempt = 0; slept && attempt < 5; ++attempt) {
    looks = -1;
    ZR_OPEN_OR_SKIP(queue, folder_.text(), with);
    const auto where = file(1);
    const detail::AlignedMemory memory(kBlock);
    const IoRequest read{.file = where, .memory = memory.bytes(), .name = "moments"};
    const auto begin = SteadyClock::now();
    const Work work = queue->submit({&read, 1});
    looks = 0;
    std::optional<Error> error;
    try {
      work.wait();
    } catch (const Error& thrown) {
      error = thrown;
    }
    const bool ready = work.event().ready();
    slept = SteadyClock::now() - begin >= kDelay;
    work.wait();
    if (slept) continue;
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(error->what(), HasSubstr("rank 1 is gone"));
    EXPECT_FALSE(ready);
  }
  EXPECT_FALSE(slept);
}

constexpr Setup kSetups[] = {
    {IoEngineKind::kIoUring, FileAccess::kDirect, true},   {IoEngineKind::kIoUring, FileAccess::kDirect, false},
    {IoEngineKind::kIoUring, FileAccess::kBuffered, true}, {IoEngineKind::kIoUring, FileAccess::kBuffered, false},
    {IoEngineKind::kAio, FileAccess::kDirect, false},      {IoEngineKind::kAio, FileAccess::kBuffered, false},
    {IoEngineKind::kThreads, FileAccess::kDirect, false},  {IoEngineKind::kThreads, FileAccess::kBuffered, false},
    {IoEngineKind::kThreads, FileAccess::kBuffered, true},
};
INSTANTIATE_TEST_SUITE_P(Engines, Queue, ::testing::ValuesIn(kSetups), text_of);
INSTANTIATE_TEST_SUITE_P(Long, Queue, ::testing::ValuesIn(kSetups), text_of);

TEST(OpenIoQueue, AutoTakesTheNextWhereOneIsRefusedAndSaysWhy) {
  const TemporaryFolder folder;
  const bool direct = ScratchFile::create(folder.text(), kBlock)->access() == FileAccess::kDirect;
  const Armed armed("io.io_uring.setup:errno=EPERM;io.aio.setup@hit=3:errno=EAGAIN");
  const auto second = open_io_queue(folder.text());
  EXPECT_EQ(second->name(), direct ? "aio" : "threads");
  EXPECT_THAT(second->reason(), HasSubstr("io_uring: "));
  const auto third = open_io_queue(folder.text());
  EXPECT_EQ(third->name(), "threads");
  EXPECT_THAT(third->reason(),
              HasSubstr(direct ? "aio: io_setup: Resource temporarily unavailable" : "aio: would block"));
}

TEST(OpenIoQueue, AioIsNotTakenByItselfWhereFilesAreBuffered) {
  const TemporaryFolder folder;
  const Armed armed("io.io_uring.setup:errno=ENOSYS;io.direct:errno=EINVAL");
  const auto queue = open_io_queue(folder.text());
  EXPECT_EQ(queue->name(), "threads");
  EXPECT_THAT(queue->reason(),
              HasSubstr("aio: would block in submit(), because files are buffered (O_DIRECT: Invalid"));
}

TEST(OpenIoQueue, ANamedEngineThatDoesNotWorkIsAnError) {
  const TemporaryFolder folder;
  const Armed armed("io.aio.setup:errno=EAGAIN;io.threads.transfer:errno=EIO");
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { (void)open_io_queue(folder.text(), {.engine = IoEngineKind::kAio}); }),
              HasSubstr("aio-max-nr"));
  EXPECT_THAT(error_of(ErrorCode::kIo, [&] { (void)open_io_queue(folder.text(), {.engine = IoEngineKind::kThreads}); }),
              HasSubstr("Input/output error"));
}

/// In a child: 0 if a queue of this engine moves a block, 1 if it is refused with a reason, else 2.
int without_locked_memory(const std::string& folder, IoEngineKind engine) {
  const rlimit none{0, 0};
  if (::setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0)) return 3;
  try {
    const auto queue = open_io_queue(folder, {.engine = engine});  // its probe moves blocks
    return 0;
  } catch (const Error& error) {
    const std::string text = error.what();
    return error.code() == ErrorCode::kIo && text.find(name_of(engine)) != std::string::npos ? 1 : 2;
  }
}

TEST(OpenIoQueue, WithoutLockedMemoryItWorksOrSaysWhy) {
  const TemporaryFolder folder;
  std::filesystem::permissions(folder.text(), std::filesystem::perms::all);
  for (const IoEngineKind engine :
       {IoEngineKind::kAuto, IoEngineKind::kIoUring, IoEngineKind::kAio, IoEngineKind::kThreads}) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(without_locked_memory(folder.text(), engine));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << status;
    const bool may_be_refused = engine == IoEngineKind::kIoUring || engine == IoEngineKind::kAio;
    EXPECT_LE(WEXITSTATUS(status), may_be_refused ? 1 : 0) << name_of(engine);
  }
}

TEST(OpenIoQueue, OptionsOutOfRangeAreRefused) {
  const TemporaryFolder folder;
  const auto refused = [&](const IoQueueOptions& options) {
    return error_of(ErrorCode::kUsage, [&] { (void)open_io_queue(folder.text(), options); });
  };
  EXPECT_THAT(refused({.depth = 0}), HasSubstr("depth; where"));
  EXPECT_THAT(refused({.depth = 5000}), HasSubstr("1 to 4096"));
  EXPECT_THAT(refused({.num_threads = 0}), HasSubstr("num_threads"));
  EXPECT_THAT(refused({.timeout = Milliseconds{0}}), HasSubstr("timeout"));
}

TEST(OpenIoQueue, NamesOfEnginesAreReadBack) {
  for (const IoEngineKind kind :
       {IoEngineKind::kAuto, IoEngineKind::kIoUring, IoEngineKind::kAio, IoEngineKind::kThreads})
    EXPECT_EQ(io_engine_of(name_of(kind)), kind);
  EXPECT_EQ(io_engine_of("libaio"), std::nullopt);
}

}  // namespace
}  // namespace zeroth::test
