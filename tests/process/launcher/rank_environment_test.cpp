// What a rank finds: variables, descriptors, signals, standard input.
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

/// Values that "[rank] NAME=VALUE" lines of `out` give to a name, by rank.
std::vector<std::string> values_of(const std::string& out, const std::string& name, int num_ranks) {
  std::vector<std::string> result;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::string head = "[" + std::to_string(rank) + "] " + name + "=";
    const std::size_t start = out.find(head);
    const std::size_t value = start + head.size();
    result.push_back(start == std::string::npos ? "(none)" : out.substr(value, out.find('\n', value) - value));
  }
  return result;
}

TEST(RankEnvironment, TellsEachRankItsPlace) {
  const std::vector<std::string> same{"WORLD_SIZE",  "LOCAL_WORLD_SIZE", "GROUP_RANK",    "NODE_RANK",
                                      "MASTER_ADDR", "MASTER_PORT",      "ZEROTH_JOB_ID", "TORCHELASTIC_RUN_ID"};
  std::vector<std::string> arguments{"env", "RANK", "LOCAL_RANK", "PROBE_OWN"};
  arguments.insert(arguments.end(), same.begin(), same.end());
  // A launcher may itself be a rank of another one: its own place must not shine through.
  const JobSetup nested{.environment = {{"RANK", "9"}, {"WORLD_SIZE", "77"}, {"PROBE_OWN", "kept"}}};
  std::set<std::string> ids;
  for (int repeat = 0; repeat < 2; ++repeat) {
    Job job(Job::probe(3, arguments), nested);
    const JobResult result = job.wait();
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(values_of(result.out, "RANK", 3), ::testing::ElementsAre("0", "1", "2"));
    EXPECT_THAT(values_of(result.out, "LOCAL_RANK", 3), ::testing::ElementsAre("0", "1", "2"));
    EXPECT_EQ(values_of(result.out, "PROBE_OWN", 3)[2], "kept");
    for (const std::string& name : same) {
      const auto values = values_of(result.out, name, 3);
      EXPECT_EQ(std::set<std::string>(values.begin(), values.end()).size(), 1U) << name;
    }
    EXPECT_EQ(values_of(result.out, "WORLD_SIZE", 1)[0], "3");
    EXPECT_EQ(values_of(result.out, "LOCAL_WORLD_SIZE", 1)[0], "3");
    EXPECT_EQ(values_of(result.out, "GROUP_RANK", 1)[0], "0");
    EXPECT_EQ(values_of(result.out, "NODE_RANK", 1)[0], "0");
    EXPECT_EQ(values_of(result.out, "MASTER_ADDR", 1)[0], "127.0.0.1");
    const int port = std::stoi(values_of(result.out, "MASTER_PORT", 1)[0]);
    EXPECT_GT(port, 1023);
    EXPECT_LT(port, 65536);
    const std::string id = values_of(result.out, "ZEROTH_JOB_ID", 1)[0];
    EXPECT_EQ(id.size(), 32U) << id;
    EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos) << id;
    EXPECT_EQ(values_of(result.out, "TORCHELASTIC_RUN_ID", 1)[0], id);
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 2U);
}

TEST(RankEnvironment, SharesTheCoresUnlessTheUserChose) {
  ::unsetenv("OMP_NUM_THREADS");
  Job job({"-n", "2", "--bind-cores", "off", RANK_PROBE_PATH, "env", "OMP_NUM_THREADS"});
  const JobResult result = job.wait();
  const int threads = std::stoi(values_of(result.out, "OMP_NUM_THREADS", 2)[1]);
  EXPECT_GE(threads, 1);
  EXPECT_LE(threads, static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
  EXPECT_THAT(result.err,
              ::testing::StartsWith("zeroth-run: OMP_NUM_THREADS=" + std::to_string(threads) + " in every rank"));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;

  Job chosen({"-n", "2", "--bind-cores", "off", RANK_PROBE_PATH, "env", "OMP_NUM_THREADS"},
             {.environment = {{"OMP_NUM_THREADS", "5"}}});
  const JobResult kept = chosen.wait();
  EXPECT_EQ(values_of(kept.out, "OMP_NUM_THREADS", 2)[1], "5");
  EXPECT_EQ(kept.err, "");

  Job given(
      {"-n", "2", "--bind-cores", "off", "--env", "OMP_NUM_THREADS=6", RANK_PROBE_PATH, "env", "OMP_NUM_THREADS"});
  const JobResult set = given.wait();
  EXPECT_EQ(values_of(set.out, "OMP_NUM_THREADS", 2)[0], "6");
  EXPECT_EQ(set.err, "");
}

TEST(RankEnvironment, PassesValuesByteForByte) {
  const Scratch scratch;
  const std::string touched = scratch.path("touched");
  const std::string value = "$(touch " + touched + ") `touch " + touched + "` \"'; =,\\ \t\xff";
  Job job(Job::probe(2, {"env", "ODD", "EMPTY", "MASTER_PORT"},
                     {"--env", "ODD=" + value, "--env", "EMPTY=", "--env", "MASTER_PORT=4242"}));
  const JobResult result = job.wait();
  EXPECT_THAT(result.out, HasSubstr("[1] ODD=" + value + "\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] EMPTY=\n"));
  EXPECT_THAT(result.out, HasSubstr("[0] MASTER_PORT=4242\n"));
  EXPECT_FALSE(std::filesystem::exists(touched));
}

TEST(RankEnvironment, InheritsNothingOfTheLauncher) {
  Job job(Job::probe(3, {"self"}), {.descriptor_limit = 64});
  const JobResult result = job.wait();
  for (int rank = 0; rank < 3; ++rank) {
    const std::string head = "[" + std::to_string(rank) + "] ";
    EXPECT_THAT(result.out, HasSubstr(head + "descriptors 3\n"));
    EXPECT_THAT(result.out, HasSubstr(head + "limit 64\n"));
    EXPECT_THAT(result.out, HasSubstr(head + "blocked 0\n"));
    EXPECT_THAT(result.out, HasSubstr(head + "ignored 0\n"));
    EXPECT_THAT(result.out, HasSubstr(head + "death_signal 9\n"));
    EXPECT_THAT(result.out, HasSubstr(head + "leader 1\n"));
  }
}

TEST(RankEnvironment, KeepsSignalsIgnoredThatTheUserIgnores) {
  Job job(Job::probe(1, {"self"}), {.ignored_signals = {SIGHUP, SIGPIPE, SIGCHLD}});
  EXPECT_THAT(job.wait().out, HasSubstr("[0] ignored 3\n"));
}

TEST(RankEnvironment, StandardInputIsEmpty) {
  Job job(Job::probe(2, {"count"}), {.stdin_text = "not for the ranks"});
  const JobResult result = job.wait();
  EXPECT_THAT(result.out, HasSubstr("[0] 0 read 0\n"));
  EXPECT_THAT(result.out, HasSubstr("[1] 1 read 0\n"));
}

TEST(RankEnvironment, RankZeroReadsStandardInputOnRequest) {
  for (const std::size_t bytes : {0UL, 1UL, 65536UL, 1000003UL}) {
    Job job(Job::probe(2, {"count"}, {"--stdin"}), {.stdin_text = std::string(bytes, 'i')});
    const JobResult result = job.wait();
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.out, HasSubstr("[0] 0 read " + std::to_string(bytes) + "\n"));
    EXPECT_THAT(result.out, HasSubstr("[1] 1 read 0\n"));
  }
}

TEST(RankEnvironment, ARankThatDoesNotReadItsInputIsNoProblem) {
  Job job(Job::probe(2, {"args"}, {"--stdin"}), {.stdin_text = std::string(1000003, 'i')});
  EXPECT_EQ(job.wait().exit_code, 0);
}

}  // namespace
}  // namespace zeroth::test
