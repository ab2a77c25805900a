// Each fault of fault_cases.h on one rank of four, over shared memory and over messages between processes: every other rank ends in less
// than 15 s with the right error, which names the rank, the call and the unit or parameter; or the job goes on where that is right.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <zeroth/base/failpoint.h>

#include "process/fault_cases.h"
#include "support/fork_ranks.h"
#include "support/left_behind.h"
#include "support/socket_transport.h"

namespace zeroth::testing {
namespace {

constexpr double kBoundSeconds = 15;
constexpr Milliseconds kHangs{40'000};

enum class Over { kMemory, kMessages };

/// What the ranks write to stderr.
class Outputs {
 public:
  Outputs() {
    for (int& file : files_) file = ::memfd_create("output", MFD_CLOEXEC);
  }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;
  ~Outputs() {
    for (const int file : files_) ::close(file);
  }
  void take(int rank) const { ::dup2(files_[static_cast<std::size_t>(rank)], STDERR_FILENO); }
  [[nodiscard]] std::string text(int rank) const {
    std::string text(1 << 16, '\0');
    const ssize_t got = ::pread(files_[static_cast<std::size_t>(rank)], text.data(), text.size(), 0);
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
  }

 private:
  std::array<int, kFaultRanks> files_{};
};

struct Outcome {
  test::ForkReport report{};
  std::string left{};
  std::array<std::optional<double>, kFaultRanks> seconds{};
  std::array<std::string, kFaultRanks> output{};
  bool struck = false;
};

bool is_over(pid_t pid) {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == pid;
}

Outcome run(const FaultCase& fault, Over over) {
  WatchedJob job;
  job.world = kFaultRanks;
  job.options.timeout = Milliseconds{60'000};
  job.options.frozen_after = Milliseconds{2'000};
  Times times;
  if (fault.arrange) fault.arrange(job, times);
  if (!job.happen) times.strike();  // counted from the start
  const test::LeftBehind left;
  Outcome outcome;
  {
    const Outputs outputs;
    std::optional<test::SocketMesh> mesh;
    if (over == Over::kMessages) mesh.emplace(kFaultRanks);
    const std::string name = test::unique_job();
    test::ForkRanksOptions options{.deadline = kHangs};
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
      if (mesh) mesh->close_all();
      if (!fault.hangs) return false;
      for (int rank = 0; rank < kFaultRanks; ++rank) {
        if (rank != fault.guilty && !is_over(pids[static_cast<std::size_t>(rank)])) return true;
      }
      ::kill(pids[static_cast<std::size_t>(fault.guilty)], SIGKILL);
      return false;
    };
    outcome.report = test::fork_ranks(
        kFaultRanks,
        [&](int rank) {
          const rlimit none{};
          ::setrlimit(RLIMIT_CORE, &none);
          outputs.take(rank);
          if (rank == fault.guilty) {
            arm_failpoints(parse_failpoints(fault.failpoints), rank);
            while (fault.absent) ::pause();
          }
          try {
            run_watched_rank(job, mesh ? World::from_transport(mesh->transport(rank), "the test") : shared_memory_world(name, rank, kFaultRanks));
          } catch (...) {
            times.end(rank);
            throw;
          }
          times.end(rank);
        },
        options);
    for (int rank = 0; rank < kFaultRanks; ++rank) {
      outcome.seconds[static_cast<std::size_t>(rank)] = times.seconds(rank);
      outcome.output[static_cast<std::size_t>(rank)] = outputs.text(rank);
    }
  }
  outcome.struck = times.has_struck();
  outcome.left = left.text();
  return outcome;
}

void expect_told(const test::RankFailure* failure, const Told& told, const std::string& all) {
  if (failure == nullptr) {
    ADD_FAILURE() << "a rank ended well\n" << all;
    return;
  }
  EXPECT_EQ(failure->code, told.code) << "rank " << failure->rank << ": " << failure->text;
  for (const std::string& word : told.words) {
    EXPECT_TRUE(std::regex_search(failure->text, std::regex(word))) << "rank " << failure->rank << " does not say \"" << word << "\": " << failure->text;
  }
}

class Faults : public ::testing::TestWithParam<std::tuple<FaultCase, Over>> {};

TEST_P(Faults, AreExplained) {
  const auto& [fault, over] = GetParam();
  const std::optional<Told>& told = over == Over::kMemory ? fault.memory : fault.messages;
  const Outcome outcome = run(fault, over);
  const std::string all = outcome.report.text() + outcome.output[0];
  EXPECT_TRUE(outcome.struck) << all;
  EXPECT_EQ(outcome.left, "") << all;
  for (int rank = 0; rank < kFaultRanks; ++rank) {
    if (std::getenv("ZEROTH_SHOW_FAULTS") != nullptr) {
      const auto* failure = outcome.report.of(rank);
      std::printf("  rank %d after %.1f s: %s\n", rank, outcome.seconds[static_cast<std::size_t>(rank)].value_or(-1), failure == nullptr ? "ended well" : failure->text.c_str());
      std::printf("%s", outcome.output[static_cast<std::size_t>(rank)].c_str());
    }
    const auto index = static_cast<std::size_t>(rank);
    const test::RankFailure* failure = outcome.report.of(rank);
    EXPECT_FALSE(outcome.report.ends[index].killed_at_deadline) << all;
    if (rank == fault.guilty) {
      if (fault.own) expect_told(failure, *fault.own, all);
      continue;
    }
    EXPECT_LT(outcome.seconds[index].value_or(kBoundSeconds), kBoundSeconds) << all;
    if (told) {
      expect_told(failure, *told, all);
    } else {
      EXPECT_EQ(failure, nullptr) << all;
    }
  }
  if (!told && !fault.warning.empty()) {
    EXPECT_TRUE(std::regex_search(outcome.output[0], std::regex(fault.warning))) << all;
  }
}

INSTANTIATE_TEST_SUITE_P(All,
                         Faults,
                         ::testing::Combine(::testing::ValuesIn(fault_cases()), ::testing::Values(Over::kMemory, Over::kMessages)),
                         [](const auto& param_info) {
                           return std::get<0>(param_info.param).name + (std::get<1>(param_info.param) == Over::kMemory ? "_Memory" : "_Messages");
                         });

}  // namespace
}  // namespace zeroth::testing
