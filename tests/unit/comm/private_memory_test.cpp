#include "comm/shm/private_memory.h"

#include "support/fork_ranks.h"
#include "support/private_memory.h"

#include <zeroth/base/platform.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using detail::PrivateMemory;
using Read = test::ReadsOfProcesses::Read;

std::uint64_t address_of(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data);
}

TEST(PrivateMemory, IsReadWholeHoweverFewBytesComeAtATime) {
  std::vector<char> theirs(100'001, 'x');
  theirs.front() = 'a';
  theirs.back() = 'z';
  int reads = 0;
  const auto few = std::make_shared<test::ReadsOfProcesses>([&](SystemCalls& kernel, const Read& read) -> ssize_t {
    if (++reads % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    return kernel.read_process(read.pid, read.to, read.from, std::min<std::size_t>(read.bytes, 40'000));
  });
  const PrivateMemory memory({::getpid()}, few);
  std::vector<char> here(theirs.size());
  EXPECT_EQ(memory.read(0, std::as_writable_bytes(std::span(here)), address_of(theirs.data())), 0);
  EXPECT_EQ(here, theirs);
  EXPECT_GE(reads, 4);
}

TEST(PrivateMemory, SaysWhyItCannotBeRead) {
  const PrivateMemory memory({::getpid(),
                              [] {
                                const pid_t child = ::fork();
                                if (child == 0) ::_exit(0);
                                ::waitpid(child, nullptr, 0);
                                return child;
                              }()},
                             make_system_calls());
  std::array<std::byte, 8> here{};
  EXPECT_EQ(memory.read(0, here, 0x10), EFAULT);
  EXPECT_EQ(memory.read(1, here, memory.probe_at()), ESRCH);
  EXPECT_EQ(memory.read(0, here, memory.probe_at()), 0);
}

TEST(PrivateMemory, TheWordIsAnotherOneInEveryProcess) {
  const PrivateMemory one({}, make_system_calls());
  const PrivateMemory other({}, make_system_calls());
  EXPECT_NE(one.probe_value(), other.probe_value());
}

constexpr std::size_t kMany = 100'000;

/// Two ranks sum floats of their own memory; rank 1's reads go through `reader`, after those with which the group finds
/// out what can be read.
test::ForkReport sum_with(const test::ReadsOfProcesses::Reader& reader) {
  const std::string job = test::unique_job();
  return test::fork_ranks(2, [&](int rank) {
    CommOptions options{.timeout = Milliseconds{20'000}};
    bool met = false;
    if (rank == 1) {
      options.system = std::make_shared<test::ReadsOfProcesses>([&](SystemCalls& kernel, const Read& read) -> ssize_t {
        return met ? reader(kernel, read) : kernel.read_process(read.pid, read.to, read.from, read.bytes);
      });
    }
    const std::shared_ptr<CommBackend> backend =
        make_backend("shm", {.rank = rank, .size = 2, .job = job, .options = options});
    met = true;
    try {
      std::vector<float> data(kMany, 1.0F);
      Communicator(backend).all_reduce(std::span(data));
      if (data != std::vector<float>(kMany, 2.0F)) throw std::runtime_error("the sum is wrong");
    } catch (const Error& error) {
      backend->abort(error);
      throw;
    }
  });
}

TEST(PrivateMemoryOfRanks, IsReadInPieces) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const test::ForkReport report = sum_with([](SystemCalls& kernel, const Read& read) {
    return kernel.read_process(read.pid, read.to, read.from, std::min<std::size_t>(read.bytes, 5'000));
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

TEST(PrivateMemoryOfRanks, ARankThatDiesWhileItIsReadIsNamed) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const test::ForkReport report = sum_with([](SystemCalls& kernel, const Read& read) {
    ::kill(read.pid, SIGKILL);
    ::usleep(100'000);
    return kernel.read_process(read.pid, read.to, read.from, read.bytes);
  });
  ASSERT_NE(report.of(1), nullptr);
  EXPECT_EQ(report.of(1)->code, ErrorCode::kPeerLost) << report.text();
  EXPECT_NE(report.of(1)->text.find("was killed by SIGKILL"), std::string::npos) << report.text();
}

TEST(PrivateMemoryOfRanks, MemoryThatIsGoneIsAnErrorOnAllRanks) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const test::ForkReport report = sum_with(
      [](SystemCalls& kernel, const Read& read) { return kernel.read_process(read.pid, read.to, 0x10, read.bytes); });
  ASSERT_NE(report.of(1), nullptr);
  EXPECT_EQ(report.of(1)->code, ErrorCode::kResource) << report.text();
  EXPECT_NE(report.of(1)->text.find("rank 0's memory cannot be read any more"), std::string::npos) << report.text();
  ASSERT_NE(report.of(0), nullptr);
  EXPECT_EQ(report.of(0)->code, ErrorCode::kAborted) << report.text();
}

TEST(PrivateMemoryOfRanks, LargeMessagesAreReadOnceWhereTheyLie) {
  if (kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: forked ranks";
  const std::string job = test::unique_job();
  const test::ForkReport report = test::fork_ranks(2, [&](int rank) {
    CommOptions options;
    std::size_t read_bytes = 0;
    options.system = std::make_shared<test::ReadsOfProcesses>([&](SystemCalls& kernel, const Read& read) {
      read_bytes += read.bytes;
      return kernel.read_process(read.pid, read.to, read.from, read.bytes);
    });
    const Communicator comm(make_backend("shm", {.rank = rank, .size = 2, .job = job, .options = options}));
    comm.barrier();
    const std::size_t before = read_bytes;
    std::vector<float> data(kMany, rank == 0 ? 3.0F : 0.0F);
    if (rank == 0) {
      comm.send(std::span<const float>(data), 1);
    } else {
      comm.recv(std::span(data), 0);
    }
    if (data != std::vector<float>(kMany, 3.0F)) throw std::runtime_error("another message has come");
    if (read_bytes - before != (rank == 0 ? 0 : kMany * sizeof(float)))
      throw std::runtime_error(std::to_string(read_bytes - before) + " bytes were read");
    comm.barrier();
  });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth
