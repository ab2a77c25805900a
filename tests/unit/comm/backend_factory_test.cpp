#include "support/error_of.h"
#include "support/thread_ranks.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <string>

namespace zeroth {
namespace {

using test::error_of;
using test::quick_options;

TEST(BackendFactory, AnUnknownNameNamesWhatIsBuilt) {
  const std::string text = error_of(ErrorCode::kConfig, [] { (void)make_backend("shn", {}); });
  for (const char* part : {"shn", "self", "inproc", "did you mean shm?"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(backend_names(), (std::vector<std::string>{"self", "inproc", "shm", "mpi", "shm+mpi", "nccl", "nccl+mpi"}));
}

TEST(BackendFactory, NcclSaysWhatItLacks) {
  try {
    const CommOptions options = quick_options();
    EXPECT_EQ(make_backend("nccl", {.rank = 0, .size = 1, .hub = make_inproc_hub(1), .options = options})->kind(),
              "nccl");  // with a GPU
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kEnvironment) << error.what();
    EXPECT_NE(std::string(error.what()).find("where: "), std::string::npos) << error.what();
  }
}

TEST(BackendFactory, ARankOutsideTheWorldIsRefused) {
  for (const auto& [rank, size] : {std::pair{2, 2}, {-1, 2}, {0, 0}}) {
    error_of(ErrorCode::kUsage, [&] { (void)make_backend("shm", {.rank = rank, .size = size, .job = "x"}); });
  }
  error_of(ErrorCode::kUsage, [] { (void)make_backend("self", {.rank = 0, .size = 2}); });
  error_of(ErrorCode::kConfig, [] { (void)make_backend("shm", {.rank = 0, .size = 4096, .job = "x"}); });
}

TEST(BackendFactory, SumsOfATransportThatHasNoneAreRefused) {
  CommOptions options = quick_options();
  options.reduction = Reduction::kTransport;
  for (const char* name : {"shm", "inproc", "shm+mpi"}) {
    const std::string text = error_of(ErrorCode::kConfig, [&] {
      (void)make_backend(name, {.rank = 0, .size = 1, .job = "refused", .hub = make_inproc_hub(1), .options = options});
    });
    for (const char* part : {"zeroth.reduction", "rank_order", "transport", name})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(make_backend("self", {.rank = 0, .size = 1, .options = options})->kind(), "self");  // nothing to sum
}

TEST(BackendFactory, InprocChecksItsHub) {
  error_of(ErrorCode::kUsage, [] { (void)make_backend("inproc", {}); });
  error_of(ErrorCode::kUsage, [] { (void)make_inproc_hub(0); });
  const auto hub = make_inproc_hub(1);
  const std::string text =
      error_of(ErrorCode::kMismatch, [&] { (void)make_backend("inproc", {.rank = 0, .size = 2, .hub = hub}); });
  EXPECT_NE(text.find("2 ranks"), std::string::npos) << text;
  const auto group = make_backend("inproc", {.rank = 0, .size = 1, .hub = hub});
  error_of(ErrorCode::kMismatch, [&] { (void)make_backend("inproc", {.rank = 0, .size = 1, .hub = hub}); });
}

TEST(BackendFactory, AMissingThreadIsATimeout) {
  CommOptions options;
  options.timeout = Milliseconds{100};
  const auto hub = make_inproc_hub(2);
  error_of(ErrorCode::kTimeout,
           [&] { (void)make_backend("inproc", {.rank = 0, .size = 2, .hub = hub, .options = options}); });
}

TEST(BackendFactory, ControlMemoryIsPlannedAndCounted) {
  for (const char* name : {"self", "inproc", "shm"}) {
    CommOptions options = quick_options();
    options.ledger = MemoryLedger::create();
    options.staging_bytes = 100'000;
    {
      const auto group =
          make_backend(name, {.rank = 0, .size = 1, .job = "counted", .hub = make_inproc_hub(1), .options = options});
      EXPECT_EQ(group->memory_bytes(), transport_bytes(name, 1, options)) << name;
      EXPECT_EQ(options.ledger->live()[MemoryState::kControl], group->memory_bytes()) << name;
      EXPECT_EQ(options.ledger->live().total(), group->memory_bytes()) << name;
      const auto part = group->split(0, 0, "part");
      EXPECT_EQ(options.ledger->live().total(), group->memory_bytes() + part->memory_bytes()) << name;
    }
    EXPECT_EQ(options.ledger->live().total(), 0U) << name;
  }
  CommOptions little;
  little.staging_bytes = 1000;
  error_of(ErrorCode::kUsage, [&] { (void)make_backend("shm", {.job = "little", .options = little}); });
}

class Refusing final : public SystemCalls {
 public:
  Refusing(bool memfd, bool pidfd) : memfd_(memfd), pidfd_(pidfd) {}
  int memfd_create(const char* name, unsigned flags) override {
    return memfd_ ? refuse(ENOSYS) : kernel_->memfd_create(name, flags);
  }
  int pidfd_open(pid_t pid) override { return pidfd_ ? refuse(EPERM) : kernel_->pidfd_open(pid); }
  ssize_t read_process(pid_t pid, std::byte* to, std::uint64_t from, std::size_t bytes) override {
    return kernel_->read_process(pid, to, from, bytes);
  }

 private:
  static int refuse(int reason) {
    errno = reason;
    return -1;
  }
  bool memfd_;
  bool pidfd_;
  std::shared_ptr<SystemCalls> kernel_ = make_system_calls();
};

TEST(BackendFactory, RefusedSystemCallsAreNamedWithWhatToAllow) {
  for (const bool memfd : {true, false}) {
    CommOptions options = quick_options();
    options.system = std::make_shared<Refusing>(memfd, !memfd);
    const std::string text =
        error_of(ErrorCode::kResource, [&] { (void)make_backend("shm", {.job = "refused", .options = options}); });
    EXPECT_NE(text.find(memfd ? "memfd_create failed on rank 0" : "pidfd_open failed on rank 0"), std::string::npos)
        << text;
    EXPECT_NE(text.find("seccomp"), std::string::npos) << text;
  }
}

TEST(BackendFactory, JobComesFromTheEnvironment) {
  ::unsetenv("ZEROTH_JOB_ID");
  ::unsetenv("MASTER_ADDR");
  const std::string text = error_of(ErrorCode::kEnvironment, [] { (void)job_from_environment(); });
  EXPECT_NE(text.find("zeroth-run"), std::string::npos) << text;
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", "29500", 1);
  ::setenv("TORCHELASTIC_RUN_ID", "a", 1);
  const std::string torchrun = job_from_environment();
  ::setenv("TORCHELASTIC_RUN_ID", "b", 1);
  EXPECT_NE(job_from_environment(), torchrun);
  ::setenv("ZEROTH_JOB_ID", "mine", 1);
  EXPECT_EQ(job_from_environment(), "mine");
  for (const char* name : {"ZEROTH_JOB_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}) ::unsetenv(name);
}

TEST(BackendFactory, ALonelyWaitEndsAtItsDeadline) {
  for (const char* name : {"self", "inproc", "shm"}) {
    CommOptions options;
    options.timeout = Milliseconds{60};
    const auto group =
        make_backend(name, {.rank = 0, .size = 1, .job = "lonely", .hub = make_inproc_hub(1), .options = options});
    const std::string text = error_of(ErrorCode::kTimeout, [&] {
      group->wait_until([] { return false; }, {.what = "a miracle", .ranks = {}, .unit = "block.1", .progress = [] {
                                                 return std::string("epoch 3");
                                               }});
    });
    for (const char* part : {"a miracle", "block.1", "epoch 3"}) EXPECT_NE(text.find(part), std::string::npos) << text;
    group->abort(Error(ErrorCode::kModel, "over"));
    const std::string aborted =
        error_of(ErrorCode::kAborted, [&] { group->wait_until([] { return false; }, {.what = "more"}); });
    EXPECT_NE(aborted.find("over"), std::string::npos) << aborted;
  }
}

}  // namespace
}  // namespace zeroth
