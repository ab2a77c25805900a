// Failpoints of ranks that mpirun started: those of the MPI transport, and the middle of every call. A rank that dies
// is mpirun's to see (docs/decisions/0014-mpi-behind-a-table.md): it ends the others. A rank that throws tells them
// itself.
#include "support/attempts.h"
#include "support/left_behind.h"

#include <zeroth/base/deadline.h>
#include <zeroth/base/failpoint.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kRanks = 2;
/// mpirun itself needs half a second to start and to clean up.
constexpr Milliseconds kBound{20'000};

struct Ending {
  int status = 0;
  bool in_time = true;
  std::string output{};
};

/// mpirun with ranks that live with `spec`. `stays`: it does not end a rank because another one failed, and ends with 0
/// itself.
Ending mpirun(const std::string& spec, bool stays, const std::vector<std::string>& program = {ZEROTH_MPI_LIFE},
              int ranks = kRanks) {
  std::vector<std::string> words{ZEROTH_MPIRUN};
  std::istringstream flags(ZEROTH_MPIRUN_FLAGS);
  for (std::string word; flags >> word;) words.push_back(word);
  if (stays) words.insert(words.end(), {"--mca", "orte_abort_on_non_zero_status", "0", "--enable-recovery"});
  words.insert(words.end(), {"-n", std::to_string(ranks)});
  words.insert(words.end(), program.begin(), program.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv(kFailpointVariable, spec.c_str(), 1);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    ::execv(words.front().c_str(), arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  Ending ending;
  std::thread reader([&] {
    std::array<char, 4096> buffer{};
    for (ssize_t got = 0; (got = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
      ending.output.append(buffer.data(), static_cast<std::size_t>(got));
    }
  });
  const Deadline deadline(kBound);
  while (::waitpid(pid, &ending.status, WNOHANG) == 0) {
    if (deadline.passed()) {
      ending.in_time = false;
      ::kill(pid, SIGTERM);  // it ends its ranks, too
      ::waitpid(pid, &ending.status, 0);
      break;
    }
    std::this_thread::sleep_for(Milliseconds{5});
  }
  reader.join();
  ::close(ends[0]);
  return ending;
}

std::string at(const std::string& site, int rank, const std::string& action) {
  return site + "@rank=" + std::to_string(rank) + ":" + action;
}

/// The rank is killed at the site; mpirun says so, and nothing is left.
void expect_killed(const std::string& site, int rank, const std::string& before = "") {
  SCOPED_TRACE(site + " kills rank " + std::to_string(rank));
  const LeftBehind left;
  const Ending ending = mpirun(before + at(site, rank, "kill"), false);
  EXPECT_TRUE(ending.in_time) << ending.output;
  EXPECT_TRUE(WIFEXITED(ending.status) && WEXITSTATUS(ending.status) != 0) << ending.output;
  if (site != "mpi.open") {  // before MPI_Init mpirun does not always say who
    EXPECT_THAT(ending.output, HasSubstr("process rank " + std::to_string(rank) + " "));
    EXPECT_THAT(ending.output, HasSubstr("exited on signal 9"));
  }
  EXPECT_EQ(left.text(Milliseconds{5'000}), "");
}

TEST(MpiFailpoints, ALifeWithoutAFaultIsWhole) {
  const Ending ending = mpirun("", false);
  EXPECT_TRUE(WIFEXITED(ending.status) && WEXITSTATUS(ending.status) == 0) << ending.output;
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_THAT(ending.output, HasSubstr("rank " + std::to_string(rank) + " is whole"));
}

/// Such a process cannot end as mpirun wants it to, so it is no test by itself.
TEST(MpiFailpoints, ACallOfMpisThatDoesNotEndLeavesTheProcessWithoutMpi) {
  const LeftBehind left;
  const auto run = [] {
    return mpirun("", true,
                  {"env", "-u", "GTEST_TOTAL_SHARDS", "-u", "GTEST_SHARD_INDEX", "ZEROTH_TEST_LOSES_MPI=1",
                   ZEROTH_MISMATCH, "--gtest_color=no", "--gtest_filter=*ACallThatOneRankSkips*"});
  };
  const Ending ending = attempted(run, [](const Ending& one) {  // a busy machine starts ranks far apart
    return one.output.find("world was not complete within") == std::string::npos;
  });
  EXPECT_TRUE(ending.in_time) << ending.output;
  for (const char* part : {"[  PASSED  ] 1 test.", "[       OK ] "}) {
    const std::size_t first = ending.output.find(part);
    EXPECT_TRUE(first != std::string::npos && ending.output.find(part, first + 1) != std::string::npos)
        << "both ranks: " << ending.output;
  }
  EXPECT_EQ(left.text(Milliseconds{5'000}), "");
}

TEST(MpiFailpoints, ABadSpecIsRefusedByEveryRank) {
  const Ending ending = mpirun("mpi.opne:kill", true);
  EXPECT_THAT(ending.output, HasSubstr("rank 0 ends: [ENVIRONMENT] no such failpoint"));
  EXPECT_THAT(ending.output, HasSubstr("rank 1 ends: [ENVIRONMENT] no such failpoint"));
  EXPECT_THAT(ending.output, HasSubstr("did you mean mpi.open?"));
}

std::vector<std::string> sites_of_the_transport() {
  std::vector<std::string> sites;
  for (const Failpoint& site : failpoints()) {
    if (site.name.starts_with("mpi.") || site.name == "abort.mpi") sites.push_back(site.name);
  }
  return sites;
}

void expect_killed_in_the_transport(const std::string& site, int rank) {
  expect_killed(site, rank, site == "abort.mpi" ? at("engine.vote", rank, "throw") + ";" : "");
}

/// The ranks by turns; on each of them in the long tier.
TEST(MpiFailpoints, EverySiteOfTheTransportKills) {
  ASSERT_EQ(sites_of_the_transport().size(), 4U);
  int turn = 0;
  for (const std::string& site : sites_of_the_transport()) expect_killed_in_the_transport(site, turn++ % kRanks);
}

TEST(LongMpiFailpoints, EverySiteOfTheTransportKillsEveryRank) {
  for (const std::string& site : sites_of_the_transport()) {
    for (int rank = 0; rank < kRanks; ++rank) expect_killed_in_the_transport(site, rank);
  }
}

void expect_told(const std::string& site, int rank) {
  SCOPED_TRACE(site + " throws on rank " + std::to_string(rank));
  const LeftBehind left;
  const Ending ending = mpirun(at(site, rank, "throw"), true);
  EXPECT_TRUE(ending.in_time) << ending.output;
  const std::string planted = "planted failure at " + site;
  EXPECT_THAT(ending.output, HasSubstr("rank " + std::to_string(rank) + " ends: [INTERNAL] " + planted));
  EXPECT_THAT(ending.output, HasSubstr("rank " + std::to_string(1 - rank) + " ends: [ABORTED] rank " +
                                       std::to_string(rank) + " stopped the job: [INTERNAL] " + planted));
  EXPECT_EQ(left.text(Milliseconds{5'000}), "");
}

constexpr const char* kThrowing[] = {"mpi.start", "mpi.wait", "messages.all_reduce.mid", "engine.update"};

TEST(MpiFailpoints, ARankThatThrowsTellsTheOthers) {
  int turn = 0;
  for (const char* site : kThrowing) expect_told(site, turn++ % kRanks);
}

TEST(LongMpiFailpoints, EveryRankThatThrowsTellsTheOthers) {
  for (const char* site : kThrowing) {
    for (int rank = 0; rank < kRanks; ++rank) expect_told(site, rank);
  }
}

std::vector<std::string> insides_of_calls() {
  std::vector<std::string> sites;
  for (const Failpoint& site : failpoints()) {
    if (site.name.starts_with("messages.") && site.name.ends_with(".mid")) sites.push_back(site.name);
  }
  return sites;
}

/// One call here: what the ranks see of each is below.
TEST(MpiFailpoints, ARankKilledInsideACallEndsTheJob) {
  expect_killed("messages.all_reduce.mid", 1);
}

TEST(LongMpiFailpoints, ARankKilledInsideAnyCallEndsTheJob) {
  for (const std::string& site : insides_of_calls()) {
    for (int rank = 0; rank < kRanks; ++rank) expect_killed(site, rank);
  }
}

/// mpirun leaves the others alone, and the control plane tells them.
TEST(MpiFailpoints, ARankKilledInsideAnyCallIsNamedByAllOthers) {
  struct Case {
    const char* backend;
    const char* how;
    int ranks;
    std::vector<std::string> sites;
  };
  for (const Case& of :
       {Case{"mpi", "calls", 3, insides_of_calls()}, Case{"mpi", "own-sums", 3, {"mpi.start", "mpi.wait"}},
        Case{"shm+mpi", "calls", 4, {"levels.step"}}}) {
    for (const std::string& site : of.sites) {
      constexpr int kVictim = 1;
      SCOPED_TRACE(std::string(of.backend) + " " + of.how + ", " + site + " kills rank 1");
      const LeftBehind left;
      const Ending ending = mpirun(
          "", true,
          {"env", std::string("ZEROTH_BACKEND=") + of.backend, ZEROTH_MPI_LIFE, of.how, at(site, kVictim, "kill")},
          of.ranks);
      EXPECT_TRUE(ending.in_time) << ending.output;
      for (int rank = 0; rank < of.ranks; ++rank) {
        if (rank == kVictim) continue;
        EXPECT_THAT(ending.output,
                    ContainsRegex("rank " + std::to_string(rank) + " ends: \\[(PEER_LOST|ABORTED)\\] [^\n]*rank 1 "));
      }
      EXPECT_EQ(left.text(Milliseconds{5'000}), "");
    }
  }
}

}  // namespace
}  // namespace zeroth::test
