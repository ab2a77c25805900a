// A forked child, such as a data loader's worker, must not be able to write into the trainer's memory.
#include "support/sanitizer.h"

#include <zeroth/device/memory.h>

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

/// Exit status of a forked child that runs `body` and then leaves with 0; killed after ten seconds.
int status_of_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    ::signal(SIGSEGV, SIG_DFL);
    body();
    ::_exit(0);
  }
  int status = -1;
  for (int turn = 0; turn < 1000; ++turn) {
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  ADD_FAILURE() << "the child did not end";
  return status;
}

TEST(ForkedChild, CannotTouchSharedArenas) {
  const Arena arena = Arena::create(ArenaKind::kShared, 2 * kPageBytes, "not-for-children");
  const ForeignMapping foreign = map_foreign(arena.fd(), arena.capacity());
  std::memset(arena.data(), 7, arena.capacity());
  for (std::byte* target : {arena.data() + kPageBytes, foreign.bytes.data()}) {
    const int status = status_of_child([target] { *static_cast<volatile std::byte*>(target) = std::byte{99}; });
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    EXPECT_EQ(WTERMSIG(status), SIGSEGV);
  }
  EXPECT_EQ(arena.data()[kPageBytes], std::byte{7});
  EXPECT_EQ(arena.data()[0], std::byte{7});
}

TEST(ForkedChild, LetsGoOfSharedArenasWithoutHarmToWhatLiesThere) {
  Arena arena = Arena::create(ArenaKind::kShared, 2 * kPageBytes, "not-for-children");
  ForeignMapping foreign = map_foreign(arena.fd(), arena.capacity());
  const int status = status_of_child([&] {
    std::vector<std::byte*> own;
    for (std::byte* address : {arena.data(), foreign.bytes.data()}) {
      // As its allocator may, where the parent's mapping is missing.
      void* mapped = ::mmap(address, 2 * kPageBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      if (mapped != address) ::_exit(10);
      std::memset(mapped, 5, 2 * kPageBytes);
      own.push_back(address);
    }
    arena = {};
    foreign = {};
    for (const std::byte* address : own) {
      if (address[0] != std::byte{5} || address[2 * kPageBytes - 1] != std::byte{5}) ::_exit(11);
    }
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ForkedChild, WritesToPrivateArenasStayItsOwn) {
  const Arena arena = Arena::create(ArenaKind::kPrivate, 2 * kPageBytes, "copied");
  std::memset(arena.data(), 7, arena.capacity());
  const int status = status_of_child([&arena] { std::memset(arena.data(), 99, arena.capacity()); });
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(arena.data()[0], std::byte{7});
  EXPECT_EQ(arena.data()[arena.capacity() - 1], std::byte{7});
}

TEST(Arena, MoreThanTheLimitIsAnError) {
  if (test::kSanitized) GTEST_SKIP() << "not under sanitizers: they need all of the address space";
  const int status = status_of_child([] {
    const rlimit limit{std::size_t{1} << 30U, std::size_t{1} << 30U};
    ::setrlimit(RLIMIT_AS, &limit);
    for (const ArenaKind kind : {ArenaKind::kPrivate, ArenaKind::kShared}) {
      try {
        const Arena arena = Arena::create(kind, std::size_t{2} << 30U, "limited");
        ::_exit(10);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kOutOfMemory) ::_exit(11);
      }
    }
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace zeroth
