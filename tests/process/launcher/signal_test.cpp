// Signals to zeroth-run itself.
#include "process/launcher/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <string>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

/// State letter of a process (proc(5)), waited for.
bool reaches_state(pid_t pid, char wanted) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(file, text);
    const std::size_t name_end = text.rfind(')');
    if (name_end != std::string::npos && text.size() > name_end + 2 && text[name_end + 2] == wanted) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TEST(Signal, StopSignalsArePassedOnAndEndTheJob) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    Job job(Job::probe(3, {"wait", "child"}));
    const auto pids = job.wait_for("READY", 3);
    job.signal(signal);
    const JobResult result = job.wait(kEndDeadline);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_THAT(result.err, HasSubstr("zeroth-run: stopped by signal " + std::to_string(signal)));
    EXPECT_THAT(result.err, HasSubstr("; 3 ranks were ended.\n"));
  }
}

TEST(Signal, RanksReceiveTheSignalItselfAndMayCleanUp) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Job job(Job::probe(2, {"wait", "catch"}));
    job.wait_for("READY", 2);
    job.signal(signal);
    const JobResult result = job.wait(kEndDeadline);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_THAT(result.out, HasSubstr("[0] CAUGHT 0 " + std::to_string(signal)));
    EXPECT_THAT(result.out, HasSubstr("[1] CAUGHT 1 " + std::to_string(signal)));
  }
}

TEST(Signal, RanksThatIgnoreItAreKilledAfterTheGrace) {
  Job job(Job::probe(2, {"wait", "ignore", "child"}, {"--grace", "0.3"}));
  job.wait_for("READY", 2);
  job.signal(SIGINT);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 130);
}

TEST(Signal, TheDefaultGraceIsShort) {
  Job job(Job::probe(2, {"wait", "ignore"}));
  job.wait_for("READY", 2);
  job.signal(SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 143);
}

TEST(Signal, TheSecondCtrlCKills) {
  Job job(Job::probe(2, {"wait", "ignore", "child"}, {"--grace", "3600"}));
  const auto pids = job.wait_for("READY", 2);
  job.signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // two equal pending signals would be one
  EXPECT_TRUE(is_alive(pids.at(0)));
  job.signal(SIGINT);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 130);
}

TEST(Signal, RanksDieWithAKilledLauncher) {
  Job job(Job::probe(4, {"wait", "ignore"}), {.outlived = kEndDeadline});
  const auto pids = job.wait_for("READY", 4);
  job.signal(SIGKILL);
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
  EXPECT_EQ(job.wait(kEndDeadline).signal, SIGKILL);
}

TEST(Signal, IgnoredStopSignalsStayIgnored) {
  Job job(Job::probe(2, {"wait"}), {.ignored_signals = {SIGHUP}});
  const auto pids = job.wait_for("READY", 2);
  job.signal(SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (const auto& [rank, pid] : pids) {
    EXPECT_TRUE(is_alive(pid));
    ::kill(pid, SIGUSR1);
  }
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(Signal, UserSignalsReachEveryRankAndOnlyTheRank) {
  // Each rank has a child that would die of it.
  Job job({"-q", "-n", "3", "/bin/sh", "-c",
           "sleep 0.5 & trap 'echo GOT $RANK 1; wait $!; echo CHILD $RANK $?; exit 0' USR1; echo READY $RANK "
           "$$; wait"});
  job.wait_for("READY", 3);
  job.signal(SIGUSR1);
  job.wait_for("GOT", 3);
  for (const auto& [rank, status] : job.wait_for("CHILD", 3)) EXPECT_EQ(status, 0) << "rank " << rank;
  EXPECT_EQ(job.wait(kEndDeadline).exit_code, 0);
}

TEST(Signal, CtrlZStopsTheRanksAndContinuingGoesOn) {
  Job job(Job::probe(2, {"wait"}));
  const auto pids = job.wait_for("READY", 2);
  job.signal(SIGTSTP);
  EXPECT_TRUE(reaches_state(job.pid(), 'T'));
  EXPECT_TRUE(reaches_state(pids.at(0), 'T'));
  EXPECT_TRUE(reaches_state(pids.at(1), 'T'));
  job.signal(SIGCONT);
  EXPECT_TRUE(reaches_state(pids.at(0), 'S'));
  for (const auto& [rank, pid] : pids) ::kill(pid, SIGUSR1);
  EXPECT_EQ(job.wait(kEndDeadline).exit_code, 0);
}

TEST(Signal, ASignalDuringAFailureKillsAtOnceAndKeepsTheCause) {
  Job job(Job::probe(3, {"wait", "ignore", "exit=5"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(1), SIGUSR1);
  ASSERT_TRUE(all_gone_within({{1, pids.at(1)}}, kEndDeadline));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  job.signal(SIGINT);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("rank 1"));
}

}  // namespace
}  // namespace zeroth::test
