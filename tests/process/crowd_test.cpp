// A hundred ranks, a thousand in the long tier, as processes with the control plane that jobs have: how they meet, end
// in order, and hear of what went wrong.
#include "support/crowd.h"

#include "support/fork_ranks.h"

#include <zeroth/comm/control_plane.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Milliseconds kLong{100'000};

struct Member {
  int rank;
  RankActivity& activity;
  Crowd& crowd;
};

/// Every rank meets the others, joins, and runs the body; who fails stays until all have failed, as no program does: so
/// what the others say cannot be of its end.
class CrowdTest : public testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  /// The rank that something happens to.
  static int odd() { return ranks() * 567 / 1000; }
  static std::string odd_rank() { return "rank " + std::to_string(odd()); }
  static std::string all_others() {
    return "ranks 0-" + std::to_string(odd() - 1) + ", " + std::to_string(odd() + 1) + "-" +
           std::to_string(ranks() - 1);
  }
  /// Too few for the control plane of so many.
  static rlim_t few_files() { return ranks() < 1'000 ? 64 : 256; }

  ForkReport run(const std::function<void(const Member&)>& body, Milliseconds silent_after,
                 const ForkRanksOptions& options = {.deadline = Milliseconds{120'000}}) {
    return fork_ranks(
        ranks(),
        [&](int rank) {
          if (before_joining_) before_joining_(rank);
          const auto activity = std::make_shared<RankActivity>(rank, ranks());
          const std::unique_ptr<CommBackend> group = crowd_.group(rank);
          const std::unique_ptr<ControlPlane> control =
              ControlPlane::join(*group, activity, {.timeout = kLong, .silent_after = silent_after});
          try {
            body({rank, *activity, crowd_});
            if (control->strangers() > 0) throw std::runtime_error("strangers have come");
          } catch (const std::exception&) {
            crowd_.note(rank) = 1;
            while (count_failed() < expected_failures_) std::this_thread::sleep_for(Milliseconds{100});
            throw;
          }
        },
        options);
  }

  /// All but the odd rank, each with these words.
  void expect_all_say(const ForkReport& report, ErrorCode code, const testing::Matcher<const std::string&>& words) {
    int others = 0;
    for (const RankFailure& failure : report.failures) {
      if (failure.rank == odd()) continue;
      ++others;
      ASSERT_EQ(failure.code, code) << failure.rank << ": " << failure.text;
      ASSERT_THAT(failure.text, words) << failure.rank;
    }
    EXPECT_EQ(others, ranks() - 1);
  }

  [[nodiscard]] int count_failed() {
    int failed = 0;
    for (int rank = 0; rank < ranks(); ++rank) failed += crowd_.note(rank) > 0 ? 1 : 0;
    return failed;
  }

  Crowd crowd_{ranks()};
  int expected_failures_ = ranks() - 1;
  std::function<void(int rank)> before_joining_{};
};

INSTANTIATE_TEST_SUITE_P(Ranks, CrowdTest, ::testing::Values(100), ::testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Long, CrowdTest, ::testing::Values(1'000), ::testing::PrintToStringParamName());

TEST_P(CrowdTest, MeetsAndEndsInOrder) {
  // A user's limit is often 1,024 files; rank 0 holds a connection and a process of each rank.
  before_joining_ = [](int rank) {
    rlimit files{};
    ::getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = few_files();
    if (rank == 0 && ::setrlimit(RLIMIT_NOFILE, &files) != 0) throw std::runtime_error("setrlimit failed");
  };
  const ForkReport report = run(
      [](const Member& here) {
        here.crowd.meet(here.rank, here.activity, 0, kLong);
        if (here.rank == odd()) std::this_thread::sleep_for(Milliseconds{2'000});
        here.crowd.meet(here.rank, here.activity, 1, kLong);
      },
      Milliseconds{60'000});
  EXPECT_EQ(report.text(), "");
}

TEST_P(CrowdTest, AllHearThatRank0MayOpenTooFewFiles) {
  before_joining_ = [](int rank) {
    const rlimit few{.rlim_cur = few_files(), .rlim_max = few_files()};
    if (rank == 0 && ::setrlimit(RLIMIT_NOFILE, &few) != 0) throw std::runtime_error("setrlimit failed");
  };
  expected_failures_ = 0;
  const ForkReport report = run([](const Member& /*here*/) {}, Milliseconds{60'000});
  EXPECT_NE(report.of(odd()), nullptr);
  expect_all_say(
      report, ErrorCode::kResource,
      AllOf(HasSubstr("rank 0 cannot listen for the control plane"),
            HasSubstr("too few open files are allowed for the control plane of " + std::to_string(ranks()) + " ranks"),
            HasSubstr("got: " + std::to_string(few_files())), HasSubstr("ulimit -Hn")));
}

TEST_P(CrowdTest, AllHearWhoWasKilled) {
  const ForkReport report = run(
      [](const Member& here) {
        here.crowd.meet(here.rank, here.activity, 0, kLong);
        if (here.rank == odd()) {
          while (!here.crowd.all_at(1, odd())) std::this_thread::sleep_for(Milliseconds{20});
          ::kill(::getpid(), SIGKILL);
        }
        here.crowd.meet(here.rank, here.activity, 1, kLong);
      },
      Milliseconds{60'000});
  expect_all_say(report, ErrorCode::kPeerLost,
                 AllOf(HasSubstr(odd_rank() + " (pid"), HasSubstr("was killed by SIGKILL"),
                       HasSubstr("place 1 from " + odd_rank())));
}

TEST_P(CrowdTest, AllHearWhoIsFrozen) {
  const ForkReport report = run(
      [](const Member& here) {
        here.crowd.meet(here.rank, here.activity, 0, kLong);
        if (here.rank == odd()) ::kill(::getpid(), SIGSTOP);
        here.crowd.meet(here.rank, here.activity, 1, kLong);
      },
      Milliseconds{5'000},
      {.deadline = Milliseconds{120'000}, .meanwhile = [this](const std::vector<pid_t>& pids, Milliseconds /*since*/) {
         if (count_failed() < expected_failures_) return true;
         ::kill(pids[static_cast<std::size_t>(odd())], SIGKILL);
         return false;
       }});
  expect_all_say(
      report, ErrorCode::kPeerLost,
      AllOf(HasSubstr(odd_rank() + " (pid"), HasSubstr("has given no sign of life for"), HasSubstr("it was stopped")));
}

TEST_P(CrowdTest, AllHearWhoMakesAnotherCall) {
  expected_failures_ = ranks();
  const ForkReport report = run(
      [](const Member& here) {
        here.crowd.meet(here.rank, here.activity, 0, kLong);
        here.crowd.meet(here.rank, here.activity, here.rank == odd() ? 2 : 1, kLong);
      },
      Milliseconds{60'000});
  expect_all_say(report, ErrorCode::kMismatch,
                 AllOf(HasSubstr(odd_rank() + " waits for place 2"), HasSubstr(all_others() + " wait for place 1")));
}

TEST_P(CrowdTest, AtTheDeadlineAllHearWhoIsMissingAndWhereItIs) {
  const ForkReport report = run(
      [this](const Member& here) {
        here.crowd.meet(here.rank, here.activity, 0, kLong);
        if (here.rank == odd()) {
          here.activity.at("train.cpp", 57, "load_batch");
          here.activity.enter(Phase::kBetweenSteps);
          while (count_failed() < expected_failures_) std::this_thread::sleep_for(Milliseconds{100});
          return;
        }
        here.crowd.meet(here.rank, here.activity, 1, Milliseconds{6'000});
      },
      Milliseconds{60'000});
  expect_all_say(
      report, ErrorCode::kTimeout,
      AllOf(HasSubstr(odd_rank() + " (pid"), HasSubstr("is between steps, after step 0, at train.cpp:57 in load_batch"),
            HasSubstr(all_others() + " wait for place 1")));
}

}  // namespace
}  // namespace zeroth::test
