// The error of one rank on the others: what it is about comes through, however often it is passed on.
#include "comm/control/end_of_job.h"

#include <zeroth/comm/control_plane.h>
#include <zeroth/comm/rank_activity.h>

#include <gtest/gtest.h>

#include <string>

namespace zeroth {
namespace {

TEST(EndOfJob, AnErrorOfTheRanksOwnNamesTheRank) {
  const Error own(ErrorCode::kModel, "no loss", {.who = "rank 2/4"});
  EXPECT_STREQ(end_of_job(2, own).what(), "[ABORTED] rank 2 stopped the job: [MODEL] no loss; who: rank 2/4");
  EXPECT_STREQ(end_of_job(2, Error(ErrorCode::kIo, "full")).what(), "[ABORTED] rank 2 stopped the job: [IO] full");
  EXPECT_STREQ(end_of_job(2, Error(ErrorCode::kInternal, "planted", {.who = "rank 2"})).what(),
               "[ABORTED] rank 2 stopped the job: [INTERNAL] planted; who: rank 2");
  EXPECT_STREQ(end_of_job(1, Error(ErrorCode::kAborted, "the data has run out")).what(),
               "[ABORTED] rank 1 stopped the job: [ABORTED] the data has run out");
}

TEST(EndOfJob, AnErrorOfTheRanksOwnHasTheActionThatItEnded) {
  const std::string action = "action 1B3 of step 4 (stage 1 of 2)";
  EXPECT_STREQ(detail::with_action(Error(ErrorCode::kUser, "no such token", {.where = "a.py:3"}), action).what(),
               "[USER] no such token; where: a.py:3; which: action 1B3 of step 4 (stage 1 of 2)");
  EXPECT_EQ(detail::with_action(Error(ErrorCode::kModel, "no loss", {.which = "head"}), action).context().which,
            "head, in " + action);
  EXPECT_EQ(detail::with_action(Error(ErrorCode::kModel, "no loss", {.which = "1B3"}), action).context().which, action);
  EXPECT_TRUE(detail::is_own_error(Error(ErrorCode::kModel, "no loss")));
  EXPECT_FALSE(detail::is_own_error(Error(ErrorCode::kPeerLost, "rank 1 was killed")));
  EXPECT_FALSE(detail::is_own_error(Error(ErrorCode::kAborted, "rank 1 stopped the job: [MODEL] no loss")));
  EXPECT_FALSE(detail::is_own_error(JobVerdict(ErrorCode::kModel, "no loss")));
}

TEST(EndOfJob, WhatIsAboutAnotherRankStaysAsItIs) {
  for (const Error& error : {Error(ErrorCode::kPeerLost, "rank 1 was killed", {.who = "rank 2/4"}),
                             Error(ErrorCode::kMismatch, "different calls", {.who = "rank 2/4"}),
                             Error(ErrorCode::kTimeout, "no answer", {.who = "rank 2/4"}),
                             Error(ErrorCode::kAborted, "rank 1 stopped the job: [MODEL] no loss", {.who = "rank 2/4"}),
                             Error(ErrorCode::kUsage, "step() without a backward", {.who = "rank 21/40"}),
                             Error(JobVerdict(ErrorCode::kTimeout, "no answer"))}) {
    EXPECT_STREQ(end_of_job(2, error).what(), error.what());
  }
}

TEST(EndOfJob, AStopForALossIsTheLoss) {
  const auto cause = [](const std::string& message) {
    return std::string(detail::cause_of_stop(Error(ErrorCode::kAborted, message, {.where = "x"})).what());
  };
  EXPECT_EQ(cause("rank 1 stopped the job: [PEER_LOST] rank 2 was killed; who: rank 1/4"),
            "[PEER_LOST] rank 2 was killed; who: rank 1/4");
  EXPECT_EQ(cause("rank 0 stopped the job: [ABORTED] rank 1 stopped the job: [MISMATCH] different calls"),
            "[MISMATCH] different calls");
  EXPECT_EQ(cause("rank 0 stopped the job: [ABORTED] rank 1 stopped the job: [MODEL] no loss"),
            "[ABORTED] rank 1 stopped the job: [MODEL] no loss");
}

TEST(EndOfJob, ItSaysOnceWho) {
  const Error own(ErrorCode::kModel, "no loss", {.where = "a", .who = "rank 1/4, step 4 (forward)", .hint = "b"});
  const Error end = end_of_job(1, own);
  EXPECT_STREQ(end.what(),
               "[ABORTED] rank 1 stopped the job: [MODEL] no loss; where: a; hint: b; who: rank 1/4, step 4 (forward)");
  EXPECT_EQ(end.context().who, "rank 1/4, step 4 (forward)");
  // What the transport says of a loss: who saw it is that rank, also once this one has added itself.
  const Error loss(ErrorCode::kPeerLost, "rank 0 was killed",
                   {.where = "a", .who = "rank 2/4, step 4 (backward)", .expected = "b; c", .hint = "d"});
  const Error cause = detail::cause_of_stop(
      Error(ErrorCode::kAborted, std::string("rank 2 stopped the job: ") + loss.what(), {.who = "rank 1/4"}));
  EXPECT_STREQ(cause.what(), loss.what());
  EXPECT_EQ(cause.context().who, "rank 2/4, step 4 (backward)");
  EXPECT_STREQ(RankActivity(1, 4).dated(cause).what(), loss.what());
  EXPECT_EQ(detail::without_who("[IO] full; who: rank 1/2"), "[IO] full");
  EXPECT_EQ(detail::without_who("[IO] full; hint: look"), "[IO] full; hint: look");
}

TEST(EndOfJob, AStopForAnErrorOfTheRanksOwnStays) {
  for (const std::string message :
       {"rank 1 stopped the job: [MODEL] no loss", "rank 1 stopped the job: [ABORTED] the data has run out",
        "rank 1 stopped the job: no code", "rank 1 stopped the job: [NO_SUCH_CODE] text",
        "rank 1 stopped the job: [PEER_LOST", "this rank stopped the job: [PEER_LOST] rank 2 was killed",
        "a call was interrupted"}) {
    EXPECT_EQ(detail::cause_of_stop(Error(ErrorCode::kAborted, message)).message(), message);
  }
}

}  // namespace
}  // namespace zeroth
