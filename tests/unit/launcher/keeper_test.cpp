// Groups of processes outlive the one that watches them only if it has said so.
#include "launcher/keeper.h"

#include <zeroth/base/deadline.h>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <thread>

namespace zeroth::launcher {
namespace {

/// A sleeping child that leads its own group.
class Sleeper {
 public:
  Sleeper() : pid_(::fork()) {
    if (pid_ == 0) {
      ::setpgid(0, 0);
      for (;;) ::pause();
    }
    ::setpgid(pid_, pid_);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;
  ~Sleeper() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  [[nodiscard]] pid_t group() const { return pid_; }
  /// Looks until it has ended, at most so long.
  [[nodiscard]] bool ends_within(Milliseconds time) const {
    const Deadline deadline(time);
    siginfo_t info{};
    while (!deadline.passed()) {
      if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_)
        return true;
      std::this_thread::sleep_for(Milliseconds{5});
    }
    return false;
  }

 private:
  pid_t pid_;
};

TEST(Keeper, EndsWhatItWatchesWhenItsLauncherIsKilled) {
  const Sleeper watched;
  const Sleeper forgotten;
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    const Keeper keeper;
    keeper.watch(forgotten.group());
    keeper.watch(watched.group());
    keeper.forget(forgotten.group());
    ::kill(::getpid(), SIGKILL);
  }
  ASSERT_EQ(::waitpid(launcher, nullptr, 0), launcher);
  EXPECT_TRUE(watched.ends_within(Milliseconds{10'000}));
  EXPECT_FALSE(forgotten.ends_within(Milliseconds{100}));
}

TEST(Keeper, EndsNothingWhenItIsNotNeededAnyMore) {
  const Sleeper watched;
  {
    const Keeper keeper;
    keeper.watch(watched.group());
  }
  EXPECT_FALSE(watched.ends_within(Milliseconds{100}));
}

TEST(Keeper, HoldsNothingOpenOfItsLauncher) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const Keeper keeper;
  ::close(ends[1]);
  pollfd watched{.fd = ends[0], .events = POLLIN, .revents = 0};
  EXPECT_EQ(::poll(&watched, 1, 10'000), 1);
  EXPECT_NE(watched.revents & POLLHUP, 0);
  ::close(ends[0]);
}

}  // namespace
}  // namespace zeroth::launcher
