// One rank fails: all are ended, the right one is named, nothing is left.
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

std::string pid_text(pid_t pid) {
  return " (pid " + std::to_string(pid) + ") ";
}

TEST(Failure, AllRanksThatEndWithZeroIsSuccess) {
  Job job(Job::probe(4, {"args", "x"}));
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
}

TEST(Failure, ARankThatEndsEarlyWithZeroIsNoFailure) {
  Job job(Job::probe(3, {"wait"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(1), SIGUSR1);
  ASSERT_TRUE(all_gone_within({{1, pids.at(1)}}, kEndDeadline));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // longer than the window for better causes
  EXPECT_TRUE(is_alive(pids.at(0)));
  EXPECT_TRUE(is_alive(pids.at(2)));
  ::kill(pids.at(0), SIGUSR1);
  ::kill(pids.at(2), SIGUSR1);
  EXPECT_EQ(job.wait().exit_code, 0);
}

TEST(Failure, ExitCodeOfTheFailedRankIsTheJobs) {
  for (const int code : {1, 2, 64, 70, 76, 78, 255}) {
    Job job(Job::probe(4, {"wait", "exit=" + std::to_string(code)}));
    const auto pids = job.wait_for("READY", 4);
    ::kill(pids.at(2), SIGUSR1);
    const JobResult result = job.wait(kEndDeadline);
    EXPECT_EQ(result.exit_code, code);
    EXPECT_EQ(result.err, "zeroth-run: rank 2" + pid_text(pids.at(2)) + "exited with code " + std::to_string(code) +
                              "; the other 3 ranks were ended.\n");
  }
}

TEST(Failure, ASignalIsNamed) {
  const std::map<int, std::string> names{{SIGKILL, "SIGKILL"}, {SIGABRT, "SIGABRT"}, {SIGSEGV, "SIGSEGV"},
                                         {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGTERM, "SIGTERM"}};
  for (const auto& [signal, name] : names) {
    Job job(Job::probe(2, {"wait", "signal=" + std::to_string(signal)}));
    const auto pids = job.wait_for("READY", 2);
    ::kill(pids.at(0), SIGUSR1);
    const JobResult result = job.wait(kEndDeadline);
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_THAT(result.err, HasSubstr("zeroth-run: rank 0" + pid_text(pids.at(0)) + "was killed by signal " +
                                      std::to_string(signal) + " (" + name + ")"));
    EXPECT_THAT(result.err, EndsWith("; the other rank was ended.\n"));
  }
}

TEST(Failure, ASingleRankHasNoOthers) {
  Job job(Job::probe(1, {"wait", "exit=9", "now=0"}));
  const auto pids = job.wait_for("READY", 1);
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_EQ(result.err, "zeroth-run: rank 0" + pid_text(pids.at(0)) + "exited with code 9.\n");
}

TEST(Failure, RanksThatIgnoreSigtermAreKilled) {
  Job job(Job::probe(3, {"wait", "ignore", "exit=5"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(0), SIGUSR1);
  EXPECT_TRUE(all_gone_within(pids, kEndDeadline));
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
}

TEST(Failure, RanksThatObeySigtermMayCleanUp) {
  Job job(Job::probe(3, {"wait", "catch", "exit=5"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(0), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.out, HasSubstr("[1] CAUGHT 1 15\n"));
  EXPECT_THAT(result.out, HasSubstr("[2] CAUGHT 2 15\n"));
}

TEST(Failure, FrozenRanksAreToldAndEnded) {
  Job job(Job::probe(3, {"wait", "catch", "exit=5"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(1), SIGSTOP);
  ::kill(pids.at(2), SIGSTOP);
  ::kill(pids.at(0), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.out, HasSubstr("[1] CAUGHT 1 15\n"));
  EXPECT_THAT(result.out, HasSubstr("[2] CAUGHT 2 15\n"));
}

TEST(Failure, GrandchildrenAreEndedWithTheirRanks) {
  Job job(Job::probe(3, {"wait", "child", "ignore", "exit=5"}));
  const auto pids = job.wait_for("READY", 3);
  const auto children = job.wait_for("CHILD", 3);
  ::kill(pids.at(1), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_TRUE(all_gone_within(children, std::chrono::milliseconds{0}));
}

TEST(Failure, GrandchildrenAreEndedAfterSuccessToo) {
  Job job(Job::probe(2, {"wait", "child"}));
  const auto pids = job.wait_for("READY", 2);
  const auto children = job.wait_for("CHILD", 2);
  for (const auto& [rank, pid] : pids) ::kill(pid, SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 0);
}

TEST(Failure, ChildrenWithASessionOfTheirOwnEndWithTheJob) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c",
           "setsid sh -c 'trap "
           " TERM; sleep 60 & sleep 60' >/dev/null 2>&1 & sleep 0.3; exit 5"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 5);
}

TEST(Failure, ChildrenThatTheLauncherHadBeforeAreLeftAlone) {
  const std::string command = "sh -c 'sleep 30 >/dev/null 2>&1 & echo $!; exec " ZEROTH_RUN_PATH " -q -n 1 true'";
  FILE* pipe = ::popen(command.c_str(), "r");
  pid_t before = 0;
  EXPECT_EQ(std::fscanf(pipe, "%d", &before), 1);
  EXPECT_EQ(::pclose(pipe), 0);
  EXPECT_TRUE(is_alive(before));
  ::kill(before, SIGKILL);
}

TEST(Failure, TheEndOfGrandchildrenIsWaitedFor) {
  Job job(Job::probe(1, {"wait", "child", "heavy"}));
  const auto pids = job.wait_for("READY", 1);
  const auto children = job.wait_for("HELD", 1);
  ::kill(pids.at(0), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 0);
}

TEST(Failure, AGrandchildThatWritesWithoutEndCannotHoldTheJob) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c", "yes & exit 3"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 3);
}

TEST(Failure, OutputOfAGrandchildThatEndsSoonIsKept) {
  Job job({"-q", "-n", "1", "/bin/sh", "-c", "(sleep 0.1; echo late) & exit 0"});
  EXPECT_EQ(job.wait().out, "[0] late\n");
}

TEST(Failure, TheLastErrorLineIsPartOfTheReport) {
  const std::string error = "ZEROTH ERROR [CONFIG] rank=1/3: unknown key. hint";
  Job job(Job::probe(3, {"wait", "exit=78", "error=[zeroth 1/3] error: " + error}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(1), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 78);
  EXPECT_THAT(result.err, EndsWith("zeroth-run: rank 1" + pid_text(pids.at(1)) + "exited with code 78: " + error +
                                   "; the other 2 ranks were ended.\n"));
}

TEST(Failure, TheLastLineOfARankThatDoesNotExplainItselfIsPartOfTheReport) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c", "[ $RANK = 0 ] && exec sleep 30; echo first >&2; echo bye >&2; exit 3"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr(" exited with code 3, its last line of stderr: bye; the other rank was ended.\n"));
}

TEST(Failure, RanksCanReadWhichOthersHaveEndedWell) {
  const std::string waits =
      "while ! grep -q '^1 ' $ZEROTH_ENDED_RANKS; do sleep 0.02; done; cat $ZEROTH_ENDED_RANKS; echo $ZEROTH_JOB_ID";
  Job job({"-q", "-n", "2", "--no-prefix", "/bin/sh", "-c", "[ $RANK = 1 ] && exit 0; " + waits});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::istringstream lines(result.out);
  std::string job_word, id, size, rank, pid, code, same;
  lines >> job_word >> id >> size >> rank >> pid >> code >> same;
  EXPECT_EQ(job_word + " " + size + " " + rank + " " + code, "job 2 1 0");
  EXPECT_EQ(id, same);
}

TEST(Failure, RanksThatFailBeforeTheLastIsStartedAreReportedInFull) {
  Job job({"-q", "-n", "16", "/bin/sh", "-c", "echo 'ZEROTH ERROR [CONFIG] at once' >&2; exit 78"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 78);
  EXPECT_THAT(result.err, HasSubstr("exited with code 78: ZEROTH ERROR [CONFIG] at once"));
}

TEST(Failure, TheCauseIsNamedAndNotTheEcho) {
  // Rank 0 notices first that a peer is lost (76); the peer's own death follows within the window.
  Job job(Job::probe(3, {"wait", "exit=76", "error=ZEROTH ERROR [PEER_LOST] rank 2 is gone"}));
  const auto pids = job.wait_for("READY", 3);
  ::kill(pids.at(0), SIGUSR1);
  ASSERT_TRUE(all_gone_within({{0, pids.at(0)}}, kEndDeadline));
  ::kill(pids.at(2), SIGKILL);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: rank 2" + pid_text(pids.at(2)) +
                                    "was killed by signal 9 (SIGKILL); "
                                    "the other 2 ranks were ended.\n"));
}

TEST(Failure, ARankThatEndsSlowlyAfterItsErrorIsNamed) {
  // The others lose it at once and say so as Python does; the interpreter of the culprit takes its time.
  const std::string script =
      "if [ $RANK = 1 ]; then sleep 0.7; exit 1; fi; echo 'RuntimeError: [PEER_LOST] rank 1 left early' >&2; exit 1";
  Job job({"-q", "-n", "3", "/bin/sh", "-c", script});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: rank 1 (pid "));
  EXPECT_THAT(result.err, EndsWith(" exited with code 1; the other 2 ranks were ended.\n"));
}

TEST(Failure, TheRecordOfARankIsNamedAndOnlyThatOfThisJob) {
  const Scratch scratch;
  const std::string folder = scratch.path("logs");
  std::filesystem::create_directory(folder);
  std::ofstream(folder + "/trace-rank0.jsonl") << "of an earlier job\n";
  const auto run = [&](const std::string& script) {
    Job job({"-q", "-n", "2", "--log-dir", folder, "/bin/sh", "-c", script});
    return job.wait(kEndDeadline).err;
  };
  EXPECT_THAT(run("exit 3"), Not(HasSubstr("details")));
  const std::string leaves =
      R"(if [ $RANK = 1 ]; then echo '{}' > "$ZEROTH_TRACE_DIR/trace-rank1.jsonl"; exit 76; fi; sleep 100)";
  EXPECT_THAT(run(leaves), EndsWith("; details: " + folder + "/trace-rank1.jsonl.\n"));
}

TEST(Failure, DeathsByOurOwnHandAreNotTheCause) {
  Job job(Job::probe(4, {"wait", "exit=76"}));
  const auto pids = job.wait_for("READY", 4);
  ::kill(pids.at(3), SIGUSR1);
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_THAT(result.err, HasSubstr("rank 3"));
}

TEST(Failure, AllRanksMayFailAtOnce) {
  Job job({"-q", "-n", "7", "/bin/sh", "-c", "exit 11"});
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 11);
  EXPECT_THAT(result.err, HasSubstr("exited with code 11"));
}

TEST(Failure, TheKernelsKillForLackOfMemoryIsSaid) {
  // A memory cgroup of version 1 below our own, in which the whole job runs.
  std::ifstream cgroups("/proc/self/cgroup");
  std::string folder;
  for (std::string line; std::getline(cgroups, line);) {
    const std::size_t at = line.find(":memory:");
    if (at != std::string::npos)
      folder = "/sys/fs/cgroup/memory" + line.substr(at + 8) + "/zeroth-test-" + std::to_string(::getpid());
  }
  std::error_code error;
  if (folder.empty() || !std::filesystem::create_directory(folder, error))
    GTEST_SKIP() << "not permitted: no memory cgroup to make";
  const auto write = [&folder](const std::string& name, const std::string& value) {
    std::ofstream file(folder + name);
    file << value << std::flush;
    return file.good();
  };
  if (!write("/memory.limit_in_bytes", "64M")) {
    ::rmdir(folder.c_str());
    GTEST_SKIP() << "not permitted: no limit for a memory cgroup";
  }
  (void)write("/memory.swappiness", "0");
  const std::string rank = "[ $RANK = 0 ] && exec sleep 30; exec dd if=/dev/zero of=/dev/null bs=300M count=1";
  const std::string command =
      "echo $$ > " + folder + "/cgroup.procs; exec " ZEROTH_RUN_PATH " -q -n 2 /bin/sh -c '" + rank + "' 2>&1";
  FILE* pipe = ::popen(command.c_str(), "r");
  std::string said;
  std::array<char, 4096> block{};
  for (std::size_t bytes = 0; (bytes = std::fread(block.data(), 1, block.size(), pipe)) > 0;)
    said.append(block.data(), bytes);
  EXPECT_EQ(WEXITSTATUS(::pclose(pipe)), 128 + SIGKILL) << said;
  EXPECT_THAT(
      said,
      HasSubstr(
          "zeroth-run: [OUT_OF_MEMORY] the kernel has ended a process for lack of memory, most likely rank 1 (pid "));
  EXPECT_THAT(said, HasSubstr("zeroth-run: rank 1 (pid "));
  EXPECT_THAT(said, HasSubstr("was killed by signal 9 (SIGKILL); the other rank was ended."));
  ::rmdir(folder.c_str());
}

TEST(Failure, TimeoutEndsTheJob) {
  Job job(Job::probe(2, {"wait", "ignore", "child"}, {"--timeout", "0.3"}));
  const JobResult result = job.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 76);
  EXPECT_EQ(result.err, "zeroth-run: [TIMEOUT] the job took longer than 0.3 s; 2 ranks were ended.\n");
}

TEST(Failure, AJobInTimeDoesNotWaitForItsTimeout) {
  Job job(Job::probe(2, {"args"}, {"--timeout", "3600"}));
  EXPECT_EQ(job.wait().exit_code, 0);
}

}  // namespace
}  // namespace zeroth::test
