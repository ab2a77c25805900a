#include <zeroth/base/preemption.h>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

namespace zeroth {
namespace {

struct Told {
  int status = 0;
  std::string err{};
};

/// In a process of its own, since the handler stays; its standard error is kept.
Told in_child(const std::function<int()>& body) {
  std::array<int, 2> pipe{};
  EXPECT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(pipe[1], STDERR_FILENO);
    ::close(pipe[0]);
    ::close(pipe[1]);
    ::_exit(body());
  }
  ::close(pipe[1]);
  Told told;
  std::array<char, 4096> block{};
  for (ssize_t bytes = 0; (bytes = ::read(pipe[0], block.data(), block.size())) > 0;)
    told.err.append(block.data(), static_cast<std::size_t>(bytes));
  ::close(pipe[0]);
  ::waitpid(child, &told.status, 0);
  return told;
}

TEST(Preemption, TheFirstSigtermIsNotedAndSaid) {
  const Told told = in_child([] {
    catch_preemption();
    const bool before = preemption_requested();
    ::raise(SIGTERM);
    return !before && preemption_requested() ? 0 : 1;
  });
  EXPECT_TRUE(WIFEXITED(told.status) && WEXITSTATUS(told.status) == 0) << told.status;
  EXPECT_EQ(told.err, std::string(kMakesRoom) + "\n");
}

TEST(Preemption, RepeatsWithinASecondAreOneRequest) {
  const Told told = in_child([] {
    catch_preemption();
    for (int i = 0; i < 5; ++i) {
      ::raise(SIGTERM);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return 0;
  });
  EXPECT_TRUE(WIFEXITED(told.status)) << told.status;
  EXPECT_EQ(told.err, std::string(kMakesRoom) + "\n");
}

TEST(Preemption, TheSecondRequestEndsTheProcess) {
  const Told told = in_child([] {
    catch_preemption();
    ::raise(SIGTERM);
    std::this_thread::sleep_for(kOneRequest + std::chrono::milliseconds(50));
    ::raise(SIGTERM);
    return 0;
  });
  EXPECT_TRUE(WIFSIGNALED(told.status) && WTERMSIG(told.status) == SIGTERM) << told.status;
}

TEST(Preemption, ARequestByCallLeavesTheSignalItsFirst) {
  const Told told = in_child([] {
    catch_preemption();
    request_preemption();
    std::this_thread::sleep_for(kOneRequest + std::chrono::milliseconds(50));
    ::raise(SIGTERM);
    return preemption_requested() ? 0 : 1;
  });
  EXPECT_TRUE(WIFEXITED(told.status) && WEXITSTATUS(told.status) == 0) << told.status;
}

TEST(Preemption, AForkedChildEndsAsItAlwaysDid) {
  const Told told = in_child([] {
    catch_preemption();
    const pid_t worker = ::fork();
    if (worker == 0) {
      ::raise(SIGTERM);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(worker, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM && !preemption_requested() ? 0 : 1;
  });
  EXPECT_TRUE(WIFEXITED(told.status) && WEXITSTATUS(told.status) == 0) << told.status;
  EXPECT_EQ(told.err, "");
}

}  // namespace
}  // namespace zeroth
