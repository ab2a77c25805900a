// Ranks that make room: they get the time to save, the job ends with 75, and is not started again here.
#include "process/launcher/hosts.h"
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <zeroth/base/preemption.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <sstream>
#include <string>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kSave{3};  // longer than --grace, and than SIGKILL after a failure
const std::vector<std::string> kRoom{"room", "save=3"};
const std::string kAll =
    "preempted: 3 of 3 ranks ended with exit code 75, the others with 0; start the job again to go on.\n";

void expect_preempted(const JobResult& result) {
  EXPECT_EQ(result.exit_code, 75) << result.err;
  EXPECT_THAT(result.out, HasSubstr("SAVED 0"));
  EXPECT_THAT(result.out, HasSubstr("SAVED 1"));
  EXPECT_THAT(result.out, HasSubstr("SAVED 2"));
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: " + kAll));
}

TEST(Preempted, SigtermToTheLauncherGivesTimeToSave) {
  Job job(Job::probe(3, kRoom));
  job.wait_for("READY", 3);
  job.signal(SIGTERM);
  const JobResult result = job.wait(kSave + kEndDeadline);
  expect_preempted(result);
  EXPECT_GE(result.lasted, kSave);
}

TEST(Preempted, OneLinePerRankSaysThatItMakesRoom) {
  Job job(Job::probe(3, {"room"}));
  job.wait_for("READY", 3);
  job.signal(SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  for (const char* rank : {"0", "1", "2"})
    EXPECT_THAT(result.err, HasSubstr(std::string("[") + rank + "] " + std::string(kMakesRoom) + "\n"));
}

TEST(Preempted, SigtermToTheRanksAloneIsNoFailure) {
  Job job(Job::probe(3, kRoom));
  for (const auto& [rank, pid] : job.wait_for("READY", 3)) ::kill(pid, SIGTERM);
  expect_preempted(job.wait(kSave + kEndDeadline));
}

TEST(Preempted, ASchedulerThatSignalsTheWholeStepAsksOnce) {
  Job job(Job::probe(3, kRoom));
  const auto pids = job.wait_for("READY", 3);
  for (int i = 0; i < 3; ++i) {
    for (const auto& [rank, pid] : pids) ::kill(pid, SIGTERM);
    job.signal(SIGTERM);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  expect_preempted(job.wait(kSave + kEndDeadline));
}

TEST(Preempted, RanksThatHaveHeardOfItAreNotToldAgain) {
  Job job(Job::probe(3, kRoom));
  for (const auto& [rank, pid] : job.wait_for("READY", 3)) ::kill(pid, SIGTERM);
  std::this_thread::sleep_for(kOneRequest + std::chrono::milliseconds(200));
  job.signal(SIGTERM);
  expect_preempted(job.wait(kSave + kEndDeadline));
}

TEST(Preempted, ALaterSecondSigtermKills) {
  Job job(Job::probe(3, {"room", "save=50"}));
  job.wait_for("READY", 3);
  job.signal(SIGTERM);
  job.wait_for("SAVED", 2);
  std::this_thread::sleep_for(kOneRequest + std::chrono::milliseconds(200));
  job.signal(SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_THAT(result.err,
              HasSubstr("stopped by signal 15 (SIGTERM); 3 ranks were ended; 2 had made room; hint: --preempt-grace"));
}

TEST(Preempted, TheTimeToSaveHasAnEnd) {
  Job job(Job::probe(3, {"room", "save=50"}, {"--grace", "0.1", "--preempt-grace", "1.5"}));
  job.wait_for("READY", 3);
  job.signal(SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_THAT(result.out, HasSubstr("SAVED 1"));
  EXPECT_GE(result.lasted, std::chrono::milliseconds(1500));
}

TEST(Preempted, TheJobIsNotStartedAgain) {
  const Scratch scratch;
  for (const bool to_launcher : {true, false}) {
    Job job(Job::probe(3, {"room"}, {"--max-restarts", "3", "--json", scratch.path("status")}));
    const auto pids = job.wait_for("READY", 3);
    if (to_launcher) {
      job.signal(SIGTERM);
    } else {
      for (const auto& [rank, pid] : pids) ::kill(pid, SIGTERM);
    }
    const JobResult result = job.wait(kEndDeadline);
    expect_preempted(result);
    EXPECT_THAT(result.err, Not(HasSubstr("restart")));
    std::istringstream lines(scratch.read("status"));
    nlohmann::json last;
    for (std::string line; std::getline(lines, line);) {
      last = nlohmann::json::parse(line);
      EXPECT_NE(last.at("event"), "first_cause");
    }
    EXPECT_EQ(last.at("event"), "end");
    EXPECT_EQ(last.at("exit_code"), 75);
    EXPECT_EQ(last.at("preempted"), true);
    EXPECT_EQ(last.at("will_restart"), false);
  }
}

TEST(Preempted, AFailureOnTheWayIsOneAndStartsNothing) {
  Job job({"-q", "-n", "2", "--max-restarts", "3", "/bin/sh", "-c", "[ $RANK = 0 ] && exit 75; sleep 1; exit 5"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("rank 1"));
  EXPECT_THAT(result.err, Not(HasSubstr("restart")));
}

TEST(Preempted, SomeRanksMayHaveNothingToSave) {
  Job job({"-q", "-n", "3", "/bin/sh", "-c", "[ $RANK = 0 ] && exit 75; sleep 1; exit 0"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.err, HasSubstr("preempted: 1 of 3 ranks ended with exit code 75"));
}

TEST(Preempted, ChildrenOfTheRanksAreNotEndedBeforeThem) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c",
           "sleep 1 & child=$!; trap 'wait $child; echo CHILD $RANK $?; exit 75' TERM; echo READY $RANK $$; wait"});
  job.wait_for("READY", 2);
  job.signal(SIGTERM);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 75);
  EXPECT_THAT(result.out, HasSubstr("CHILD 0 0\n"));
  EXPECT_THAT(result.out, HasSubstr("CHILD 1 0\n"));
}

TEST(Preempted, RanksOnOtherHostsGetTheTimeToo) {
  FakeHosts hosts;
  Job job(hosts.probe({"--hosts", "h1:1,h2:2"}, kRoom), hosts.setup());
  job.wait_for("READY", 3);
  job.signal(SIGTERM);
  expect_preempted(job.wait(kSave + kEndDeadline));
}

}  // namespace
}  // namespace zeroth::test
