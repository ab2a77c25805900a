// --max-restarts, --json, --bind-cores and --launcher, as a user sees them.
#include "process/launcher/hosts.h"
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sched.h>
#include <sys/stat.h>

#include <csignal>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

/// Rank 1 fails in the first `failures` starts.
std::vector<std::string> failing(int failures) {
  return {"/bin/sh", "-c",
          "echo try $ZEROTH_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; [ $ZEROTH_RESTART_COUNT -ge " +
              std::to_string(failures) + " ] && exit 0; [ $RANK = 1 ] && exit 5; sleep 30"};
}

std::vector<std::string> with(std::vector<std::string> options, const std::vector<std::string>& program) {
  options.insert(options.end(), program.begin(), program.end());
  return options;
}

std::vector<Json> events_of(const std::string& text) {
  std::vector<Json> events;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) events.push_back(Json::parse(line));
  return events;
}

TEST(Restart, TheWholeJobIsStartedAgain) {
  const Scratch scratch;
  Job job(with({"-q", "-n", "2", "--max-restarts", "3", "--log-dir", scratch.path("logs")}, failing(2)),
          {.merge = true});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "[ranks 0-1] try 0 of 3\n[ranks 0-1] try 1 of 3\n[ranks 0-1] try 2 of 3\n");
  EXPECT_THAT(result.err, HasSubstr("exited with code 5; the other rank was ended.\nzeroth-run: restart 1 of 3\n"));
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: restart 2 of 3\n"));
  EXPECT_EQ(scratch.read("logs/rank0.stdout.log"), "try 0 of 3\ntry 1 of 3\ntry 2 of 3\n");
}

TEST(Restart, TheLastFailureIsTheJobs) {
  Job job(with({"-q", "-n", "2", "--max-restarts", "1"}, failing(9)));
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("restart 2")));
}

TEST(Restart, ASignalOrTheTimeoutIsNoReason) {
  Job stopped(Job::probe(2, {"wait"}, {"--max-restarts", "3"}));
  stopped.wait_for("READY", 2);
  stopped.signal(SIGTERM);
  const JobResult result = stopped.wait(kEndDeadline);
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_THAT(result.err, ::testing::Not(HasSubstr("restart")));
  Job late(Job::probe(2, {"wait"}, {"--max-restarts", "3", "--timeout", "0.3"}));
  EXPECT_EQ(late.wait(kEndDeadline).exit_code, 76);
}

TEST(Restart, TheTimeoutIsForAllStarts) {
  Job job({"-q", "-n", "1", "--max-restarts", "1000", "--timeout", "2", "/bin/sh", "-c", "sleep 0.5; exit 1"});
  const JobResult result = job.wait(std::chrono::seconds(10));
  EXPECT_EQ(result.exit_code, 76) << result.err;
  EXPECT_LT(result.lasted, std::chrono::seconds(5));
}

TEST(Status, TellsStartEndsCauseAndEnd) {
  const Scratch scratch;
  Job job(with({"-q", "-n", "2", "--max-restarts", "1", "--json", scratch.path("status")}, failing(1)));
  EXPECT_EQ(job.wait().exit_code, 0);
  const auto events = events_of(scratch.read("status"));
  std::vector<std::string> names;
  for (const Json& event : events) names.push_back(event["event"]);
  EXPECT_THAT(names, ElementsAre("start", "rank_end", "rank_end", "first_cause", "end", "start", "rank_end", "rank_end",
                                 "end"));
  EXPECT_EQ(events[0]["num_ranks"], 2);
  EXPECT_EQ(events[0]["command"][0], "/bin/sh");
  EXPECT_EQ(events[1]["rank"], 1);
  EXPECT_EQ(events[1]["exit_code"], 5);
  EXPECT_EQ(events[2]["signal"], SIGTERM);
  EXPECT_EQ(events[3]["rank"], 1);
  EXPECT_THAT(events[3]["text"].get<std::string>(), HasSubstr("exited with code 5"));
  EXPECT_EQ(events[4]["will_restart"], true);
  EXPECT_EQ(events[5]["restart"], 1);
  EXPECT_EQ(events[8]["exit_code"], 0);
}

TEST(Status, NamesHostsAndWhatWasNotStarted) {
  const FakeHosts hosts;
  const std::string file = hosts.scratch.path("status");
  Job job(hosts.probe({"--hosts", "h1,h2", "--json", file}, {"wait", "now=1", "exit=3"}), hosts.setup());
  EXPECT_EQ(job.wait().exit_code, 3);
  const auto events = events_of(hosts.scratch.read("status"));
  EXPECT_EQ(events.front()["hosts"], (Json{"h1", "h2"}));
  EXPECT_EQ(events[1]["host"], "h2");
  Job none(hosts.probe({"--hosts", "refused", "--json", file}, {"wait"}), hosts.setup());
  EXPECT_EQ(none.wait().exit_code, 69);
  const auto refused = events_of(hosts.scratch.read("status"));
  ASSERT_EQ(refused.size(), 2U);
  EXPECT_EQ(refused[0]["event"], "host_refused");
  EXPECT_EQ(refused[0]["host"], "refused");
  EXPECT_EQ(refused[0]["late"], false);
  EXPECT_NE(refused[0]["text"], "");
  EXPECT_EQ(refused[1]["event"], "end");
  EXPECT_EQ(refused[1]["exit_code"], 69);
}

TEST(Status, BytesThatAreNoTextDoNotBreakALine) {
  const Scratch scratch;
  Job job({"-q", "-n", "1", "--json", scratch.path("status"), RANK_PROBE_PATH, "args", "\xff\n\""});
  EXPECT_EQ(job.wait().exit_code, 0);
  EXPECT_EQ(events_of(scratch.read("status")).size(), 3U);
}

TEST(Status, AFileThatCannotBeWrittenIsSaid) {
  const Scratch scratch;
  ::mkfifo(scratch.path("fifo").c_str(), 0666);
  for (const std::string& path : {std::string("/no/status"), std::string("/"), scratch.path("fifo")}) {
    Job job({"-q", "-n", "1", "--json", path, "true"});
    const JobResult result = job.wait();
    EXPECT_EQ(result.exit_code, 74) << path;
    EXPECT_THAT(result.err, HasSubstr("[IO] cannot write the status file: "));
  }
  Job full({"-q", "-n", "1", "--json", "/dev/full", "true"});
  const JobResult result = full.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("[IO] cannot write /dev/full: No space left on device"));
}

TEST(Restart, HostsAreStartedAgain) {
  const FakeHosts hosts;
  Job job(hosts.arguments({"--hosts", "h1,h2", "--max-restarts", "1"}, failing(1)), hosts.setup());
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: restart 1 of 1\n"));
}

TEST(Restart, AHostThatWasLostIsReachedAgain) {
  const FakeHosts hosts;
  Job job(
      hosts.arguments({"--hosts", "h1,h2", "--max-restarts", "1"},
                      {"/bin/sh", "-c", "[ $ZEROTH_RESTART_COUNT = 1 ] || { echo READY $RANK $PPID; exec sleep 30; }"}),
      hosts.setup());
  const auto agents = job.wait_for("READY", 2);
  ::kill(agents.at(1), SIGKILL);
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("host h2 (rank 1): [PEER_LOST]"));
}

int allowed_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 0;
}

TEST(Binding, RanksHaveCoresOfTheirOwnUnlessTheyAreTooMany) {
  const int all = allowed_processors();
  if (all < 2) GTEST_SKIP() << "not permitted: one processor cannot be shared out";
  const std::vector<std::string> show{"/bin/sh", "-c",
                                      "grep Cpus_allowed: /proc/self/status; echo bound ${ZEROTH_BOUND_CORES-no}"};
  const auto lines = [&](const std::vector<std::string>& options) {
    Job job(with(options, show), {.merge = true});
    const JobResult result = job.wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  };
  const JobResult bound = lines({"-n", "2"});
  EXPECT_THAT(bound.err, HasSubstr("zeroth-run: every rank on cores of its own: 0 on "));
  EXPECT_THAT(bound.out, HasSubstr("] bound " + std::to_string(all / 2) + "\n"));
  EXPECT_THAT(bound.out, ::testing::Not(HasSubstr("bound no")));
  EXPECT_THAT(bound.out, HasSubstr("[1] Cpus_allowed"));
  EXPECT_THAT(bound.out, ::testing::Not(HasSubstr("[ranks 0-1] Cpus_allowed")));
  for (const auto& options : {std::vector<std::string>{"-n", "2", "--bind-cores", "off"},
                              std::vector<std::string>{"-n", std::to_string(all + 1)},
                              std::vector<std::string>{"-n", "2", "--env", "OMP_NUM_THREADS=" + std::to_string(all)}}) {
    const JobResult free = lines(options);
    EXPECT_THAT(free.err, ::testing::Not(HasSubstr("cores of its own")));
    EXPECT_THAT(free.out, ::testing::ContainsRegex("\\[ranks 0-[0-9]+\\] bound no"));
    EXPECT_THAT(free.out, ::testing::ContainsRegex("\\[ranks 0-[0-9]+\\] Cpus_allowed"));
  }
}

TEST(Binding, AHostOfOneRankIsLeftAsItIs) {
  Job job({"-n", "1", "/bin/sh", "-c", "echo ${ZEROTH_BOUND_CORES-no}"},
          {.environment = {{"ZEROTH_BOUND_CORES", "7"}}});
  EXPECT_EQ(job.wait().out, "[0] no\n");
}

TEST(Delegation, ADryRunPrintsTheCommand) {
  Job job({"--launcher", "srun", "--dry-run", "-n", "2", "--env", "A=b c", "./trainer", "a b"}, {.merge = true});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "A='b c' srun --ntasks=2 --nodes=1 --export=ALL ./trainer 'a b'\n");
}

TEST(Delegation, BecomesTheOtherLauncher) {
  const Scratch scratch;
  scratch.file("mpirun", "#!/bin/sh\necho called $# \"$A\"\nfor word; do echo \"<$word>\"; done\nexit 9\n", 0755);
  Job job({"--launcher", "mpirun", "-n", "2", "--env", "A=b c", "./trainer", "a b"},
          {.merge = true, .environment = {{"PATH", scratch.path("")}}});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_EQ(result.out, "called 6 b c\n<-n>\n<2>\n<-x>\n<A>\n<./trainer>\n<a b>\n");
  EXPECT_EQ(result.err, "zeroth-run: A='b c' mpirun -n 2 -x A ./trainer 'a b'\n");
}

}  // namespace
}  // namespace zeroth::test
