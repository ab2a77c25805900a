#include "comm/shm/peers.h"

#include <zeroth/base/interrupt.h>

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>

namespace zeroth::detail {
namespace {

/// Two ranks of a job, without transport: this one is rank 0.
struct Job {
  std::array<JobControl, 2> controls{};
  std::array<GroupControl, 2> groups{};
  std::array<GroupControl*, 2> group_pointers{&groups[0], &groups[1]};
  std::array<int, 2> world_ranks{0, 1};
  Peers peers{{.rank = 0,
               .controls = {&controls[0], &controls[1]},
               .keep = {},
               .liveness = nullptr,
               .timeout = Milliseconds{10'000},
               .polling = {}}};

  [[nodiscard]] GroupView view() const {
    return {.where = "comm.test", .group = "world", .rank = 0, .world_ranks = world_ranks, .controls = group_pointers};
  }
  [[nodiscard]] Error wait_for_nothing() {
    try {
      peers.wait(view(), [] { return false; }, [] { return WaitContext{.what = "nothing"}; });
    } catch (const Error& error) {
      return error;
    }
    return {ErrorCode::kInternal, "no error"};
  }
};

TEST(Peers, AnAbortNamesItsRankAndText) {
  const auto job = std::make_unique<Job>();
  std::strncpy(job->controls[1].abort_text, "[CONFIG] no such key", kAbortTextBytes - 1);
  job->controls[0].first_abort.store(2);
  const Error error = job->wait_for_nothing();
  EXPECT_EQ(error.code(), ErrorCode::kAborted);
  EXPECT_EQ(error.message(), "rank 1 stopped the job: [CONFIG] no such key");
}

TEST(Peers, AnAbortByARankThatDoesNotExistIsAnErrorAndNoWildRead) {
  for (const std::uint32_t word : {3U, 77U, 0x80000000U, 0xffffffffU}) {
    const auto job = std::make_unique<Job>();
    job->controls[0].first_abort.store(word);
    const Error error = job->wait_for_nothing();
    EXPECT_EQ(error.code(), ErrorCode::kAborted);
    const std::string text = error.what();
    for (const std::string& part : {std::string("damaged"), std::string("a rank below 2"),
                                    "got: " + std::to_string(word - 1), std::string("rank 0/2")}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST(Peers, ATextWithoutAnEndIsCutAtItsField) {
  const auto job = std::make_unique<Job>();
  std::memset(job->controls[1].abort_text, 'x', kAbortTextBytes);
  job->controls[0].first_abort.store(2);
  EXPECT_EQ(job->wait_for_nothing().message(), "rank 1 stopped the job: " + std::string(kAbortTextBytes, 'x'));
}

TEST(Peers, AWaitAsksForInterruptsAndEndsWithWhatTheCheckThrows) {
  struct Stop {};
  static int asked = 0;
  asked = 0;
  set_interrupt_check([] {
    if (++asked == 2) throw Stop();
  });
  const auto job = std::make_unique<Job>();
  const auto begin = SteadyClock::now();
  EXPECT_THROW(job->wait_for_nothing(), Stop);
  set_interrupt_check(nullptr);
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{5'000});  // long before the timeout
  EXPECT_EQ(job->controls[0].loss_told.load(), 0U);
}

TEST(Peers, ARankThatLeftBecauseItLostAnotherIsNotTheCause) {
  const auto job = std::make_unique<Job>();
  std::strncpy(job->controls[1].loss_text, "in group world/dp rank 2 (pid 77) is frozen", kLossTextBytes - 1);
  job->controls[1].loss_told.store(1);
  job->groups[1].departed.store(1);
  const Error error = job->wait_for_nothing();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.message(), "in group world/dp rank 2 (pid 77) is frozen: rank 1 left early after it saw that");
  EXPECT_STREQ(job->controls[0].loss_text,
               "in group world/dp rank 2 (pid 77) is frozen");  // for whoever loses this rank
}

TEST(Peers, ARankThatStopsTheJobBeforeItGoesHasNotLeftEarly) {
  const auto job = std::make_unique<Job>();
  job->groups[1].departed.store(1);
  std::strncpy(job->controls[1].abort_text, "[IO] the disk is full", kAbortTextBytes - 1);
  try {
    job->peers.wait(
        job->view(), [] { return false; },
        [&] {  // between the look at the word that stops a job and the one at who has gone
          job->controls[0].first_abort.store(2);
          return WaitContext{.what = "nothing"};
        });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "[ABORTED] rank 1 stopped the job: [IO] the disk is full; where: comm.test group=world; who: rank "
                 "0/2; expected: nothing");
  }
}

TEST(Peers, WhoWasStoppedForALossSaysTheLoss) {
  const auto job = std::make_unique<Job>();
  std::strncpy(job->controls[1].abort_text, "[PEER_LOST] rank 2 was killed; who: rank 1/3", kAbortTextBytes - 1);
  job->controls[0].first_abort.store(2);
  const Error error = job->wait_for_nothing();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.message(), "rank 2 was killed");
  EXPECT_EQ(error.context().who, "rank 1/3");
}

TEST(Peers, ARankTellsWhomItHasLostFirst) {
  const auto job = std::make_unique<Job>();
  job->groups[1].departed.store(1);
  EXPECT_EQ(job->wait_for_nothing().message(), "rank 1 left early");
  EXPECT_EQ(job->controls[0].loss_told.load(), 1U);
  EXPECT_STREQ(job->controls[0].loss_text, "in group world rank 1 left early");
}

TEST(Peers, NothingIsToldOfAPeerThatDidItsPartAndLeft) {
  const auto job = std::make_unique<Job>();
  job->groups[1].departed.store(1);
  int looks = 0;
  job->peers.wait(job->view(), [&] { return ++looks > 2; }, [] { return WaitContext{.what = "something"}; });
  EXPECT_EQ(job->controls[0].loss_told.load(), 0U);
}

}  // namespace
}  // namespace zeroth::detail
