// Ranks that take longer than others, as engines see them: over shared memory and over messages between processes.
#include "support/fork_ranks.h"
#include "support/left_behind.h"
#include "support/socket_transport.h"
#include "support/watched_job.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <thread>

namespace zeroth::test {
namespace {

using std::chrono::microseconds;

constexpr int kRanks = 4;

/// What rank 0 writes to stderr in a job whose ranks end well.
std::string output_of(const WatchedJob& job, bool over_messages) {
  const LeftBehind left;
  std::string text(1 << 16, '\0');
  {
    std::optional<SocketMesh> mesh;
    if (over_messages) mesh.emplace(kRanks);
    const std::string name = unique_job();
    const int output = ::memfd_create("output", MFD_CLOEXEC);
    ForkRanksOptions options{.deadline = Milliseconds{60'000}};
    options.meanwhile = [&](const auto&, Milliseconds) {
      if (mesh) mesh->close_all();
      return false;
    };
    const ForkReport report = fork_ranks(
        kRanks,
        [&](int rank) {
          if (rank == 0) ::dup2(output, STDERR_FILENO);
          run_watched_rank(job, mesh ? World::from_transport(mesh->transport(rank), "the test")
                                     : shared_memory_world(name, rank, kRanks));
        },
        options);
    const ssize_t got = ::pread(output, text.data(), text.size(), 0);
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    ::close(output);
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(report.of(rank), nullptr) << report.text();
  }
  EXPECT_EQ(left.text(), "");
  return text;
}

class Stragglers : public ::testing::TestWithParam<bool> {};

TEST_P(Stragglers, AFifthSlowerIsNamedWithinTwentySteps) {
  static constexpr microseconds kUsual{20'000};
  WatchedJob job;
  job.world = kRanks;
  job.steps = 1 + 20;  // the first is not compared
  job.happen = [](RankHere& here, Moment moment, int unit) {
    if (moment == Moment::kForward && unit == 1) std::this_thread::sleep_for(kUsual / 2);
    if (moment == Moment::kBackward && unit == 1)
      std::this_thread::sleep_for(here.world.rank() == 2 ? kUsual / 2 + kUsual / 5 : kUsual / 2);
  };
  const std::string output = output_of(job, GetParam());
  const std::regex line(
      R"(rank 2 is slow: it computes 1\.[12]\d times as long as the others, over 16 steps, most of it in the backward \([345]\.\d ms a step more\); they wait for it)");
  EXPECT_TRUE(std::regex_search(output, line)) << output;
  EXPECT_EQ(output.find("is slow", output.find("is slow") + 1), std::string::npos) << "named twice, or another one\n"
                                                                                   << output;
}

TEST_P(Stragglers, NoFalseAlarmInAThousandCleanSteps) {
  WatchedJob job;
  job.world = kRanks;
  job.steps = 1'000;
  job.happen = [random = std::mt19937()](RankHere& here, Moment moment, int unit) mutable {
    if (moment != Moment::kForward || unit != 1) return;
    if (here.step == 0) random.seed(static_cast<unsigned>(here.world.rank()));
    std::this_thread::sleep_for(microseconds(5'000 + random() % 1'000));
  };
  EXPECT_EQ(output_of(job, GetParam()).find("is slow"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Over, Stragglers, ::testing::Values(false, true),
                         [](const auto& over) { return over.param ? "Messages" : "Memory"; });

}  // namespace
}  // namespace zeroth::test
