// Sites that are jobs of their own: one is lost in a window or in an exchange, and the others go on with the mean of
// those that are there, to the bit that of plain loops; one is started again, and is in the mean as if it had never
// been away.
#include "parity/toy_by_hand.h"
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"
#include "support/local_jobs.h"
#include "support/thread_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSites = 3;
constexpr int kRanks = 2;

struct Told {
  std::map<std::pair<int, int>, std::string> values{};  ///< digest, by site and rank
  std::map<std::int64_t, std::vector<int>> present{};   ///< after so many steps, of rank 0 of site 0
  std::map<std::string, std::vector<int>> outer{};      ///< sites by digest
  int joined_at = -1;
  std::int64_t steps = 0;
};

/// Lines "[1:0] values ...".
Told told(const std::string& out) {
  Told all;
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    int site = -1;
    int rank = -1;
    if (std::sscanf(line.c_str(), "[%d:%d]", &site, &rank) != 2) continue;
    std::istringstream words(line.substr(line.find(']') + 1));
    std::string word;
    std::string digest;
    words >> word >> digest;
    if (word == "outer") all.outer[digest].push_back(site);
    if (word == "joined") {
      words >> all.joined_at;
      continue;
    }
    if (word != "values") continue;
    all.values[{site, rank}] = digest;
    words >> word;  // "present"
    while (words >> word) {
      const std::int64_t step = std::stoll(word);
      all.steps = std::max(all.steps, step);
      if (site != 0 || rank != 0) continue;
      for (const char one : word.substr(word.find(':') + 1)) all.present[step].push_back(one - '0');
    }
  }
  return all;
}

/// Digests of the sites, of a training by hand in which each exchange is of those sites.
std::vector<std::string> by_hand(int stage, const std::string& method, const Told& job) {
  const LocalSettings settings = settings_of_sites(method);
  const std::int64_t lag = settings.method == LocalMethod::kCo2 ? settings.steps : settings.delay;
  const auto present = [&job, lag](std::int64_t step) {
    const auto found = job.present.find(step + lag);
    return found != job.present.end() ? found->second : std::vector<int>{0, 1, 2};
  };
  std::vector<std::string> digests(kSites);
  std::mutex mutex;
  run_ranks(kSites * kRanks, [&](int rank, const std::shared_ptr<CommBackend>& backend) {
    const int site = rank / kRanks;
    const Communicator across(std::shared_ptr<CommBackend>(backend->split(rank % kRanks, site, "sites")));
    ToyTraining training = toy_of_sites(stage, kRanks);
    training.steps = static_cast<int>(job.steps);
    training.data_of = [&](int one) { return site * kRanks + one; };
    std::unique_ptr<ByHand<float>> hand;
    training.at_start = [&](Engine& engine, ToyModel&) {
      hand = std::make_unique<ByHand<float>>(engine, settings, present);
    };
    training.after_step = [&](Engine&, ToyModel&, const StepResult&) { hand->after_step(across); };
    const ToyOutcome got = train_toy_rank(training, backend->split(site, rank, "site"));
    const std::lock_guard lock(mutex);
    digests[static_cast<std::size_t>(site)] = digest_of(got.values);
  });
  return digests;
}

struct Sites {
  int stage = 3;
  std::string method = "diloco";
  std::string lost = "leave";
  std::string fault = "-";
  int step = 5;  ///< before which it is armed
  std::string folder = "-";
  std::vector<std::string> options{};
};

JobResult run(const Sites& sites) {
  std::vector<std::string> arguments{"--sites", "3", "-n", "6"};
  arguments.insert(arguments.end(), sites.options.begin(), sites.options.end());
  arguments.insert(arguments.end(), {SITE_PROBE_PATH, std::to_string(sites.stage), sites.method, sites.lost,
                                     sites.fault, std::to_string(sites.step), sites.folder});
  Job job(arguments, {.environment = {{"OMP_NUM_THREADS", "1"}}});
  return job.wait(std::chrono::seconds(60));
}

/// Sites 0 and 2 have done all steps, without site 1 from then on, with the weights of plain loops.
void expect_others_went_on(const Sites& sites) {
  SCOPED_TRACE(sites.method + ", stage " + std::to_string(sites.stage) + ", " + sites.fault);
  const JobResult result = run(sites);
  const Told job = told(result.out);
  ASSERT_EQ(job.steps, kStepsOfSites) << result.err;
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("site 1 is lost: its rank "), HasSubstr(", going on with sites 0, 2"),
                                HasSubstr("zeroth-run: site 1 ended with exit code ")));
  EXPECT_EQ(job.present.at(kStepsOfSites), (std::vector<int>{0, 2}));
  const std::vector<std::string> expected = by_hand(sites.stage, sites.method, job);
  EXPECT_EQ(job.values.size(), 4U) << result.out;
  for (const auto& [who, digest] : job.values)
    EXPECT_EQ(digest, expected[static_cast<std::size_t>(who.first)]) << "site " << who.first;
}

TEST(Sites, WithoutALossAreThoseOfOneJob) {
  for (const auto& [method, stage] : {std::pair{"streaming", 3}, std::pair{"average", 0}}) {
    const JobResult result = run({.stage = stage, .method = method});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("lost")));
    const Told job = told(result.out);
    const std::vector<std::string> expected = by_hand(stage, method, job);
    EXPECT_EQ(job.values.size(), 6U) << result.out;
    for (const auto& [who, digest] : job.values) EXPECT_EQ(digest, expected[static_cast<std::size_t>(who.first)]);
  }
}

TEST(Sites, GoOnWithoutOneThatDiesInAWindow) {
  expect_others_went_on({.fault = "engine.vote@rank=1:kill", .step = 4});
}

TEST(Sites, GoOnWithoutOneThatDiesInAnExchange) {
  // The other rank of the site has sent its part, or is about to.
  expect_others_went_on({.stage = 0, .method = "streaming", .fault = "sites.put@rank=1:kill"});
  expect_others_went_on({.method = "average", .fault = "sites.take@rank=0:kill"});
}

TEST(Sites, GoOnWithoutOneThatRaises) {
  expect_others_went_on({.method = "co2", .fault = "engine.vote@rank=0:throw", .step = 4});
}

TEST(LongSites, GoOnWithAnyMethodAtAnyStage) {
  for (const char* method : {"average", "diloco", "streaming", "co2"}) {
    for (const int stage : {0, 2, 3}) {
      for (const char* fault : {"engine.vote@rank=0:kill", "sites.put@rank=0:kill", "sites.put@rank=1:throw",
                                "sites.take@rank=1:kill", "sites.take@rank=1:throw"})
        expect_others_went_on({.stage = stage, .method = method, .fault = fault});
    }
  }
}

TEST(Sites, EndWithEachOtherUnlessAskedNotTo) {
  const JobResult result = run({.lost = "end", .fault = "engine.vote@rank=1:kill", .step = 4});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, AllOf(HasSubstr("[PEER_LOST] an exchange of local updates without all sites"),
                                HasSubstr("got: sites 0, 2; site 1 is lost: its rank 1 (pid "),
                                HasSubstr("lost_sites=\"leave\" goes on without it")));
  EXPECT_TRUE(told(result.out).values.empty()) << result.out;
}

void expect_back(const Sites& one) {
  const Scratch scratch;
  Sites sites = one;
  sites.folder = scratch.path("runs");
  sites.options = {"--max-restarts", "1"};
  SCOPED_TRACE(sites.method + ", " + sites.fault);
  const JobResult result = run(sites);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("zeroth-run: site 1: restart 1 of 1"), HasSubstr("site 1 is back")));
  const Told job = told(result.out);
  EXPECT_GE(job.joined_at, sites.step) << result.out;
  ASSERT_EQ(job.values.size(), 6U) << result.out << result.err;
  EXPECT_EQ(job.present.at(job.steps), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(job.outer.size(), sites.method == "average" ? 0U : 1U) << result.out;
  SCOPED_TRACE(result.out);
  if (sites.method == "streaming") return;  // it keeps a part of what a site that was not there had trained
  const std::vector<std::string> expected = by_hand(sites.stage, sites.method, job);
  for (const auto& [who, digest] : job.values)
    EXPECT_EQ(digest, expected[static_cast<std::size_t>(who.first)]) << "site " << who.first;
}

TEST(Sites, OneThatIsStartedAgainIsInTheMeanAgain) {
  expect_back({.fault = "sites.put@rank=1:kill"});
  expect_back({.stage = 0, .method = "streaming", .fault = "engine.vote@rank=0:kill"});
}

TEST(LongSites, OneThatIsStartedAgainIsInTheMeanOfAnyMethod) {
  for (const char* method : {"average", "diloco", "streaming", "co2"}) {
    for (const int stage : {0, 3}) {
      for (const char* fault : {"engine.vote@rank=1:throw", "sites.take@rank=0:kill"})
        expect_back({.stage = stage, .method = method, .fault = fault});
    }
  }
}

}  // namespace
}  // namespace zeroth::test
