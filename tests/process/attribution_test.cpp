// Faults drawn from seeds: every innocent rank blames the guilty one. A few in `make test`, hundreds in the long tier;
// ZEROTH_ATTRIBUTIONS=500 makes so many instead of the few; ZEROTH_ATTRIBUTION_SEED=17 makes that one alone and shows
// what its ranks say.
#include "process/attribution.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

constexpr int kInMakeTest = 24;  // one of each kind
constexpr int kInLongTier = 500;
/// Jobs side by side: they mostly wait.
constexpr int kDrivers = 3;

int number(const char* variable, int otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Driver {
  pid_t pid = 0;
  int pipe = -1;
};

/// A process that makes every kDrivers-th seed, and writes what went wrong.
Driver start_driver(int first, int seeds) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error("fork failed");
  if (pid > 0) {
    ::close(ends[1]);
    return {pid, ends[0]};
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(2);
  std::FILE* const ignored = std::freopen("/dev/null", "w", stderr);  // warnings of rank 0
  for (int seed = first; seed < seeds && ignored != nullptr; seed += kDrivers) {
    std::string wrong;
    try {
      wrong = misattribution(static_cast<std::uint64_t>(seed));
    } catch (const std::exception& error) {
      wrong = describe_seed(static_cast<std::uint64_t>(seed)) + ": " + error.what();
    }
    if (!wrong.empty() && ::write(ends[1], wrong.data(), wrong.size()) < 0) ::_exit(3);
  }
  ::_exit(::testing::Test::HasFailure() ? 4 : 0);  // what ranks leave is said on stdout
}

void expect_right(int seeds) {
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  std::vector<Driver> drivers;
  for (int driver = 0; driver < kDrivers; ++driver) drivers.push_back(start_driver(driver, seeds));
  std::string wrong;
  for (const Driver& driver : drivers) {
    std::array<char, 4096> buffer{};
    for (ssize_t got = 0; (got = ::read(driver.pipe, buffer.data(), buffer.size())) > 0;)
      wrong.append(buffer.data(), static_cast<std::size_t>(got));
    ::close(driver.pipe);
    int status = 0;
    ::waitpid(driver.pid, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "a driver ended with " << status;
  }
  EXPECT_EQ(wrong, "") << "ZEROTH_ATTRIBUTION_SEED=N makes one alone";
  std::printf("%d seeds\n", seeds);
}

TEST(Attribution, EveryRankBlamesTheGuiltyOne) {
  if (const int seed = number("ZEROTH_ATTRIBUTION_SEED", -1); seed >= 0) {
    std::printf("%s\n", describe_seed(static_cast<std::uint64_t>(seed)).c_str());
    EXPECT_EQ(misattribution(static_cast<std::uint64_t>(seed)), "");
    return;
  }
  expect_right(number("ZEROTH_ATTRIBUTIONS", kInMakeTest));
}

TEST(LongAttribution, EveryRankBlamesTheGuiltyOneOfHundreds) {
  expect_right(kInLongTier);
}

}  // namespace
}  // namespace zeroth::test
