// What rank 0 concludes from what ranks say: a table of situations, with times that the test makes up.
#include "comm/control/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace zeroth::detail {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

/// Ranks that behave as told, a clock, and everything that the coordinator has said.
class Situation {
 public:
  explicit Situation(int size, CoordinatorOptions options = {}) : coordinator_(size, options), size_(size) {
    for (int rank = 0; rank < size; ++rank) coordinator_.joined(rank, "h" + std::to_string(rank / 2), 100 + rank, now_);
  }

  /// From now on the rank waits for `ranks`; each call of it is another wait.
  void wait(int rank, const std::string& call, std::vector<int> ranks, Milliseconds timeout = Milliseconds{300'000}) {
    State& state = states_[rank];
    state.status.wait = {.id = ++ids_,
                         .looks = 0,
                         .expired = false,
                         .report = {.group = "world",
                                    .call = call,
                                    .ranks = std::move(ranks),
                                    .direct = true,
                                    .waited = {},
                                    .timeout = timeout}};
    state.since = now_;
  }
  void compute(int rank, Phase phase, std::int64_t step, const std::string& place = "") {
    states_[rank].status.wait = {};
    states_[rank].status.phase = phase;
    states_[rank].status.step = step;
    places_[rank] = place;
  }
  /// Its wait is for messages of call `sequence` of the group.
  void by_messages(int rank, const std::string& group, std::uint64_t sequence, std::uint64_t begun) {
    WaitReport& report = states_[rank].status.wait.report;
    report.direct = false;
    report.calls_of = group;
    report.sequence = sequence;
    has_begun(rank, group, begun);
  }
  void has_begun(int rank, const std::string& group, std::uint64_t calls) {
    states_[rank].status.calls_begun[group] = calls;
  }
  void several_threads(int rank) { states_[rank].status.one_thread = false; }
  void mute(int rank) { muted_.push_back(rank); }
  void tell(ErrorCode code, const std::string& text) { coordinator_.told(Error(code, text), now_); }
  void tell_of_job(const std::string& expected, const std::string& got) {
    coordinator_.told(Error(ErrorCode::kMismatch, "different calls", {.expected = expected, .got = got}), now_, true);
  }
  void ends_by(int rank, const std::string& how) { states_[rank].status.end = how; }
  void leave(int rank, const std::string& trouble = "") {
    coordinator_.left(rank, std::nullopt, now_, trouble);
    mute(rank);
  }
  void see_in(int rank, const std::string& action) { coordinator_.seen_in(rank, action, now_); }
  void end_process(int rank, const std::string& how) { coordinator_.ended(rank, how); }
  /// With a goodbye that says how it was.
  void leave_in_order(int rank) {
    coordinator_.left(rank, states_[rank].status, now_);
    mute(rank);
  }
  /// Its transport has told the waiting rank that the other one cannot come.
  void lose(int rank, int lost) { states_[rank].status.wait.lost = lost; }
  void last_call(int rank, const std::string& call) { states_[rank].status.last_call = call; }

  /// Runs for so long, or until there is a verdict. Answers come at once.
  void run(Milliseconds time) {
    const auto end = now_ + time;
    while (now_ < end && !verdict) {
      now_ += Milliseconds{50};
      for (auto& [rank, state] : states_) {
        if (state.status.wait.id == 0) continue;
        const auto waited = std::chrono::duration_cast<Milliseconds>(now_ - state.since);
        state.status.wait.looks = static_cast<std::uint64_t>(waited / Milliseconds{100});
        state.status.wait.report.waited = waited;
        state.status.wait.expired = waited >= state.status.wait.report.timeout;
        answer(rank, 0, false);
      }
      for (int rank = 0; rank < size_; ++rank) {
        if (std::ranges::find(muted_, rank) == muted_.end()) coordinator_.heard(rank, now_);
      }
      for (const CoordinatorAction& action : coordinator_.tick(now_)) {
        if (const auto* ask = std::get_if<AskAction>(&action)) {
          questions += 1;
          places_asked += ask->ask.with_place ? 1 : 0;
          for (int rank = 0; rank < size_; ++rank) answer(rank, ask->ask.question, ask->ask.with_place);
          for (int rank = 0; rank < size_; ++rank) answer(rank, 0, false);  // of their own accord: says no place
        } else if (const auto* note = std::get_if<NoteAction>(&action)) {
          notes.push_back(note->text);
        } else {
          verdict = std::get<VerdictAction>(action).error;
        }
      }
    }
  }

  [[nodiscard]] std::string last_word() const {
    return coordinator_.last_word() ? coordinator_.last_word()->message() : "";
  }

  std::vector<std::string> notes{};
  std::optional<Error> verdict{};
  int questions = 0;
  int places_asked = 0;

 private:
  struct State {
    RankStatus status{};
    SteadyClock::time_point since{};
  };
  void answer(int rank, std::uint32_t question, bool with_place) {
    if (std::ranges::find(muted_, rank) != muted_.end()) return;
    StatusMessage message{.question = question, .status = states_[rank].status};
    if (with_place) message.status.place = places_[rank];
    coordinator_.answered(rank, message, now_);
  }

  Coordinator coordinator_;
  int size_;
  SteadyClock::time_point now_{std::chrono::hours{1}};
  std::map<int, State> states_;
  std::map<int, std::string> places_;
  std::vector<int> muted_;
  std::uint64_t ids_ = 0;
};

TEST(Coordinator, NobodyIsAskedWhileNobodyWaits) {
  Situation job(4);
  for (int rank = 0; rank < 4; ++rank) job.compute(rank, Phase::kForward, 3);
  job.run(Milliseconds{60'000});
  EXPECT_EQ(job.questions, 0);
  EXPECT_THAT(job.notes, IsEmpty());
  EXPECT_FALSE(job.verdict);
}

TEST(Coordinator, ASlowRankIsNamedOnceAfterTenSecondsWithItsPlace) {
  Situation job(4);
  for (const int rank : {0, 1, 3}) job.wait(rank, "parameters of unit block.0", {2});
  job.compute(2, Phase::kBetweenSteps, 3, "train.py:57 in load_batch");
  job.run(Milliseconds{9'900});
  EXPECT_THAT(job.notes, IsEmpty());
  EXPECT_EQ(job.places_asked, 0) << "nobody is interrupted without need";
  job.run(Milliseconds{1'000});
  EXPECT_EQ(job.notes.size(), 1U);
  job.run(Milliseconds{200'000});
  ASSERT_EQ(job.notes.size(), 1U);
  EXPECT_THAT(job.notes[0],
              AllOf(HasSubstr("rank 2 (pid 102 on h1) is between steps, after step 3, at train.py:57 in load_batch"),
                    HasSubstr("ranks 0, 1, 3 wait for parameters of unit block.0"), HasSubstr("of 300.0 s")));
  EXPECT_FALSE(job.verdict);
  EXPECT_EQ(job.places_asked, 1);
}

TEST(Coordinator, AShortDeadlineHasItsLineAtAQuarter) {
  Situation job(2);
  job.wait(0, "barrier#1", {1}, Milliseconds{8'000});
  job.compute(1, Phase::kBetweenSteps, 3, "train.py:57 in load_batch");
  job.run(Milliseconds{1'900});
  EXPECT_THAT(job.notes, IsEmpty());
  job.run(Milliseconds{300});
  EXPECT_EQ(job.notes.size(), 1U);
}

TEST(Coordinator, AtTheDeadlineAllEndWithTheLine) {
  Situation job(3);
  for (const int rank : {0, 1}) job.wait(rank, "all_reduce#5", {2}, Milliseconds{4'000});
  job.compute(2, Phase::kForward, 0, "model.py:9 in forward");
  job.run(Milliseconds{10'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kTimeout);
  EXPECT_THAT(job.verdict->what(),
              AllOf(HasSubstr("no answer within 4.0 s"),
                    HasSubstr("rank 2 (pid 102 on h1) is in the forward of step 1, at model.py:9 in forward"),
                    HasSubstr("ranks 0, 1 wait for all_reduce#5")));
  EXPECT_EQ(job.notes.size(), 1U);
}

TEST(Coordinator, ARankThatDoesNotAnswerIsDescribedAllTheSame) {
  Situation job(2);
  job.wait(0, "barrier#1", {1}, Milliseconds{4'000});
  job.mute(1);
  job.run(Milliseconds{9'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kTimeout);
  EXPECT_THAT(job.verdict->what(),
              HasSubstr("rank 1 (pid 101 on h0) does not answer, and has given no sign of life for"));
}

TEST(Coordinator, RanksThatWaitForEachOtherAreTold) {
  Situation job(4);
  job.wait(0, "an export of all ranks", {1, 2, 3});
  for (const int rank : {1, 2, 3}) job.wait(rank, "the gradients of this step", {0});
  job.run(Milliseconds{10'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kMismatch);
  EXPECT_EQ(job.verdict->context().got, "rank 0 waits for an export of all ranks");
  EXPECT_EQ(job.verdict->context().expected, "ranks 1-3 wait for the gradients of this step");
  EXPECT_THAT(job.verdict->context().hint, HasSubstr("under a condition"));
}

TEST(Coordinator, ACircleOfThree) {
  Situation job(5);
  job.wait(0, "a", {1});
  job.wait(1, "b", {2});
  job.wait(2, "c", {0});
  job.wait(3, "a", {0});
  job.compute(4, Phase::kForward, 1);
  job.run(Milliseconds{5'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kMismatch);
}

TEST(Coordinator, ACircleOfAllOfVeryManyRanks) {
  constexpr int kRanks = 4'000;
  Situation job(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) job.wait(rank, "barrier#" + std::to_string(rank), {(rank + 1) % kRanks});
  job.run(Milliseconds{2'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kMismatch);
  EXPECT_THAT(job.verdict->context().expected, HasSubstr("and 3995 more"));
}

/// Whoever waits for whom: there is a verdict exactly if some ranks wait for each other in a circle.
RC_GTEST_PROP(CoordinatorProperty, ACircleIsFoundIfThereIsOne, ()) {
  const auto size = *rc::gen::inRange(2, 10);
  std::vector<std::vector<int>> awaited(static_cast<std::size_t>(size));
  Situation job(size);
  for (int rank = 0; rank < size; ++rank) {
    if (*rc::gen::inRange(0, 4) == 0) {
      job.compute(rank, Phase::kForward, 1);
      continue;
    }
    std::vector<int>& others = awaited[static_cast<std::size_t>(rank)];
    const auto count = *rc::gen::inRange(1, 4);
    for (int other = 0; other < count; ++other) others.push_back((rank + *rc::gen::inRange(1, size)) % size);
    job.wait(rank, "barrier#" + std::to_string(rank), others);
  }
  // Who waits for nobody that waits, directly or not, will go on some day: what then is left is a circle, or leads to
  // one.
  std::vector<bool> goes_on(static_cast<std::size_t>(size));
  for (int round = 0; round < size; ++round) {
    for (int rank = 0; rank < size; ++rank) {
      const std::vector<int>& others = awaited[static_cast<std::size_t>(rank)];
      goes_on[static_cast<std::size_t>(rank)] =
          std::ranges::all_of(others, [&](int other) { return goes_on[static_cast<std::size_t>(other)]; });
    }
  }
  job.run(Milliseconds{3'000});
  RC_ASSERT(job.verdict.has_value() == (std::ranges::find(goes_on, false) != goes_on.end()));
}

TEST(Coordinator, AChainThatEndsAtARankThatComputesIsNoCircle) {
  Situation job(4);
  job.wait(0, "a", {1});
  job.wait(1, "b", {2});
  job.wait(2, "c", {3});
  job.compute(3, Phase::kForward, 1, "slow.py:1");
  job.run(Milliseconds{9'000});
  EXPECT_FALSE(job.verdict);
  job.run(Milliseconds{3'000});
  ASSERT_EQ(job.notes.size(), 1U);
  EXPECT_THAT(job.notes[0], AllOf(HasSubstr("rank 3"), HasSubstr("slow.py:1")));
}

TEST(Coordinator, WaitsThatEndInBetweenAreNoCircle) {
  Situation job(2);
  for (int round = 0; round < 100; ++round) {  // each other's turn, slowly
    job.wait(0, "a", {1});
    job.wait(1, "b", {0});
    job.run(Milliseconds{150});
  }
  EXPECT_FALSE(job.verdict);
}

TEST(Coordinator, WhatHasBegunMayBeOnItsWay) {
  // Rank 1 has made call 5 already, and waits for rank 0 in call 6: what it sent is on its way.
  Situation job(2);
  job.wait(0, "all_gather#5", {1});
  job.wait(1, "all_gather#6", {0});
  job.by_messages(0, "world#0", 5, 6);
  job.by_messages(1, "world#0", 6, 7);
  job.run(Milliseconds{60'000});
  EXPECT_FALSE(job.verdict);
}

TEST(Coordinator, WhatHasNotBegunOverMessagesIsACircle) {
  Situation job(2);
  job.wait(0, "all_gather#5", {1});
  job.wait(1, "barrier#2", {0});
  job.by_messages(0, "world#0", 5, 6);
  job.by_messages(1, "world/part#1", 2, 3);
  job.has_begun(0, "world/part#1", 2);
  job.has_begun(1, "world#0", 5);
  job.run(Milliseconds{10'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kMismatch);
}

TEST(Coordinator, ARankWithASecondThreadMayStillComeByIt) {
  Situation job(2);
  job.wait(0, "a", {1});
  job.wait(1, "b", {0});
  job.several_threads(1);
  job.run(Milliseconds{60'000});
  EXPECT_FALSE(job.verdict);
}

TEST(Coordinator, WhereNobodyKnowsForWhomAllWait) {
  Situation job(3);
  for (const int rank : {0, 1, 2}) job.wait(rank, "x" + std::to_string(rank), {});
  job.run(Milliseconds{5'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kMismatch);
}

TEST(Coordinator, ALostRankIsNamedOnceSomebodyWaitsForIt) {
  for (const bool in_order : {false, true}) {
    Situation job(3);
    in_order ? job.leave_in_order(1) : job.leave(1);
    job.compute(0, Phase::kForward, 1);
    job.run(Milliseconds{5'000});
    EXPECT_FALSE(job.verdict) << "nobody needs it";
    job.wait(2, "barrier#3", {1});
    job.run(Milliseconds{2'000});
    ASSERT_TRUE(job.verdict);
    EXPECT_EQ(job.verdict->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(job.verdict->what(),
                AllOf(HasSubstr("rank 1 (pid 101 on h0)"), HasSubstr(in_order ? "left early" : "without a goodbye"),
                      HasSubstr("barrier#3")));
  }
}

TEST(Coordinator, ALostRankThatNobodyAwaitsIsNoError) {
  Situation job(3);
  job.leave_in_order(1);
  job.wait(2, "send#0", {0});
  job.compute(0, Phase::kForward, 1);
  job.run(Milliseconds{20'000});
  EXPECT_FALSE(job.verdict);
}

/// Rank 2 has finished three steps and left; the others wait for it in `phase` after as many.
Situation left_after_three_steps(Phase phase, const std::string& how = "") {
  Situation job(3);
  job.compute(2, Phase::kBetweenSteps, 3);
  job.ends_by(2, how);
  job.last_call(2, "all_reduce#5 of world/engine1, ended 0.1 s ago");
  job.leave_in_order(2);
  for (const int rank : {0, 1}) {
    job.compute(rank, phase, 3);
    job.wait(rank, "all_gather#42", {2});
  }
  return job;
}

TEST(Coordinator, ARankWithFewerBatchesIsNamedAsThat) {
  for (const Phase phase : {Phase::kForward, Phase::kBackward, Phase::kStep}) {
    Situation job = left_after_three_steps(phase);
    job.run(Milliseconds{2'000});
    ASSERT_TRUE(job.verdict);
    EXPECT_EQ(job.verdict->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(
        job.verdict->message(),
        MatchesRegex(
            R"(rank 2 \(pid 102 on h1\) left early: it ended after 3 steps, while rank 0 is in .* of step 4: unequal batch counts\?)"));
    EXPECT_THAT(job.verdict->context().hint, AllOf(HasSubstr("engine.batches(loader)"), HasSubstr("zeroth.uneven"),
                                                   HasSubstr("its last call all_reduce#5")));
    EXPECT_THAT(job.verdict->context().expected, HasSubstr("all_gather#42 from rank 2"));
  }
}

TEST(Coordinator, ACallOfSomeRanksAfterTheLastStepIsNoBatch) {
  for (const Phase phase : {Phase::kSyncPoint, Phase::kEvaluation, Phase::kBetweenSteps}) {
    Situation job = left_after_three_steps(phase);
    job.run(Milliseconds{2'000});
    ASSERT_TRUE(job.verdict);
    EXPECT_THAT(job.verdict->what(), AllOf(HasSubstr("it ended after 3 steps, while rank 0 is"),
                                           HasSubstr("a call that only some ranks make?"), Not(HasSubstr("batch"))));
    EXPECT_THAT(job.verdict->context().hint, HasSubstr("`if rank == 0`"));
  }
}

TEST(Coordinator, ARankThatLeavesBeforeOrInAStepHasNoFewerBatches) {
  const std::pair<Phase, std::string> ends[] = {
      {Phase::kStarting, "it ended before its first step, while rank 0"},
      {Phase::kBackward, "it ended in the backward of step 1, while rank 0"},
      {Phase::kAfterBackward, "it ended after a backward of step 1, while rank 0"}};
  for (const auto& [phase, text] : ends) {
    Situation job(2);
    job.compute(1, phase, 0);
    job.leave_in_order(1);
    job.compute(0, Phase::kForward, 0);
    job.wait(0, "all_gather#1", {1});
    job.run(Milliseconds{2'000});
    ASSERT_TRUE(job.verdict);
    EXPECT_THAT(job.verdict->what(),
                AllOf(HasSubstr(text), Not(HasSubstr("batch")), HasSubstr("see where that rank returned")));
  }
}

TEST(Coordinator, WhereItIsKnownHowARankEndedNothingIsGuessed) {
  Situation job = left_after_three_steps(Phase::kForward, "sys.exit(7) at train.py:9 in main");
  job.run(Milliseconds{2'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_THAT(
      job.verdict->what(),
      AllOf(HasSubstr("left early: it ended by sys.exit(7) at train.py:9 in main, after 3 steps, while rank 0 is"),
            Not(HasSubstr("batch"))));
  EXPECT_EQ(job.verdict->context().hint, "look at the output of that rank");
}

TEST(Coordinator, RanksInDifferentCallsHearTheirLinesAndNames) {
  Situation job(12);
  job.compute(0, Phase::kSyncPoint, 3, "train.py:7 in main");
  job.compute(11, Phase::kSyncPoint, 3, "train.py:9 in main");
  job.compute(1, Phase::kSyncPoint, 3, "train.py:11 in main");
  job.tell_of_job("step() on rank 11", "barrier() on rank 0");
  job.run(Milliseconds{50});
  job.tell_of_job("barrier() \"A\" on rank 0", "step() on rank 11");
  EXPECT_FALSE(job.verdict) << "the other one may know more";
  job.run(Milliseconds{300});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->context().expected, "step() on rank 11 at train.py:9 in main");
  EXPECT_EQ(job.verdict->context().got, "barrier() \"A\" on rank 0 at train.py:7 in main");
  Situation silent(2);
  silent.compute(0, Phase::kSyncPoint, 3, "train.py:7 in main");
  silent.mute(1);
  silent.tell_of_job("barrier#1 \"A\" (rank 0)", "barrier#1 \"B\" (rank 1)");
  silent.run(Milliseconds{400});
  ASSERT_TRUE(silent.verdict) << "in less than ranks wait for it";
  EXPECT_EQ(silent.verdict->context().expected, "barrier#1 \"A\" (rank 0 at train.py:7 in main)");
  EXPECT_EQ(silent.verdict->context().got, "barrier#1 \"B\" (rank 1)");
}

TEST(Coordinator, WhatATransportKnowsForCertainWaitsForNoGrace) {
  Situation job = left_after_three_steps(Phase::kForward);
  job.run(Milliseconds{500});
  EXPECT_FALSE(job.verdict) << "its last message may be on its way";
  job.lose(1, 2);
  job.run(Milliseconds{100});
  ASSERT_TRUE(job.verdict);
  EXPECT_THAT(job.verdict->message(), HasSubstr("while rank 1 is in the forward of step 4"));
}

TEST(Coordinator, ARankThatGaveItsGroupUpAndLivesIsAskedWhereItIs) {
  Situation job(2);
  job.compute(1, Phase::kBetweenSteps, 3, "train.py:9 in plot");
  job.compute(0, Phase::kForward, 3);
  job.wait(0, "all_gather#42", {1});
  job.lose(0, 1);
  job.run(Milliseconds{200});
  EXPECT_FALSE(job.verdict) << "it may be about to say why";
  job.run(Milliseconds{300});
  ASSERT_TRUE(job.verdict);
  EXPECT_THAT(job.verdict->what(),
              AllOf(HasSubstr("left early: it ended after 3 steps"), HasSubstr("it was at train.py:9 in plot")));
}

TEST(Coordinator, ARankThatLivesAndLostItsConnectionHasNotLeft) {
  Situation job(2);
  job.compute(1, Phase::kBetweenSteps, 3);
  job.wait(0, "all_gather#42", {1});
  job.by_messages(0, "world#0", 42, 43);
  job.lose(0, 1);
  job.run(Milliseconds{5'000});
  EXPECT_FALSE(job.verdict);
}

TEST(Coordinator, ASilentRankIsLost) {
  Situation job(2, {.silent_after = Milliseconds{3'000}});
  job.mute(1);
  job.wait(0, "barrier#1", {1});
  job.run(Milliseconds{10'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->code(), ErrorCode::kPeerLost);
  EXPECT_THAT(job.verdict->what(), HasSubstr("no sign of life for 3."));
}

TEST(Coordinator, WhoIsCutOffFromAllOthersIsTold) {
  Situation all(3);
  all.leave(2, "Connection timed out");
  all.mute(1);
  all.run(Milliseconds{9'000});
  EXPECT_FALSE(all.verdict.has_value()) << "they may come back";
  all.run(Milliseconds{2'000});
  ASSERT_TRUE(all.verdict.has_value());
  EXPECT_EQ(all.verdict->code(), ErrorCode::kPeerLost);
  EXPECT_THAT(all.verdict->what(), AllOf(HasSubstr("rank 1 (pid 101 on h0) has given no sign of life"),
                                         HasSubstr("none from any other rank either")));
}

TEST(Coordinator, WhoIsNotCutOffFromAllOthersGoesOn) {
  Situation some(3);
  some.leave(2);
  some.run(Milliseconds{30'000});
  EXPECT_FALSE(some.verdict.has_value()) << "rank 1 is there";
  Situation left(3);
  left.leave_in_order(1);
  left.leave_in_order(2);
  left.run(Milliseconds{30'000});
  EXPECT_FALSE(left.verdict.has_value()) << "all have left in order";
  Situation one(3);
  one.leave_in_order(1);
  one.leave(2);
  one.run(Milliseconds{30'000});
  ASSERT_TRUE(one.verdict.has_value());
  EXPECT_THAT(one.verdict->what(), HasSubstr("rank 2 (pid 102 on h1) is gone"));
}

TEST(Coordinator, ALossSaysWhatTheSystemSaid) {
  Situation job(2);
  job.wait(0, "barrier#1", {1});
  job.leave(1, "Connection reset by peer (errno 104)");
  job.run(Milliseconds{3'000});
  ASSERT_TRUE(job.verdict);
  EXPECT_THAT(job.verdict->what(),
              HasSubstr("its control connection ended without a goodbye (Connection reset by peer (errno 104))"));
}

TEST(Coordinator, TheEndOfAProcessIsSaidWhereTheSystemTells) {
  Situation job(2);
  job.wait(0, "barrier#1", {1});
  job.leave(1, "Connection reset by peer (errno 104)");
  job.lose(0, 1);
  job.run(Milliseconds{300});
  EXPECT_FALSE(job.verdict) << "the transport's own words are as good";
  job.end_process(1, "was killed by SIGKILL (signal 9)");
  job.run(Milliseconds{100});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->message(), "rank 1 (pid 101 on h0) was killed by SIGKILL (signal 9)");
}

TEST(Coordinator, WhoIsLostWasLastSeenInAnAction) {
  Situation killed(2);
  killed.wait(0, "recv#1", {1});
  killed.see_in(1, "action 1B3 of step 4 (stage 1 of 2)");
  killed.run(Milliseconds{400});
  killed.leave(1);
  killed.lose(0, 1);
  killed.end_process(1, "was killed by SIGKILL (signal 9)");
  killed.run(Milliseconds{200});
  ASSERT_TRUE(killed.verdict);
  EXPECT_EQ(killed.verdict->message(),
            "rank 1 (pid 101 on h0) was killed by SIGKILL (signal 9), last seen in action 1B3 of step 4 (stage 1 of 2) "
            "0.4 s before");
  Situation frozen(2);
  frozen.wait(0, "recv#1", {1});
  frozen.see_in(1, "action 1B3 of step 4 (stage 1 of 2)");
  frozen.mute(1);
  frozen.run(Milliseconds{30'000});
  ASSERT_TRUE(frozen.verdict);
  EXPECT_THAT(frozen.verdict->message(), MatchesRegex(".* hangs, last seen in action 1B3 of step 4 .stage 1 of 2."));
  Situation between_steps(2);
  between_steps.wait(0, "recv#1", {1});
  between_steps.see_in(1, "action 1B3 of step 4 (stage 1 of 2)");
  between_steps.see_in(1, "");
  between_steps.leave(1);
  between_steps.run(Milliseconds{3'000});
  ASSERT_TRUE(between_steps.verdict);
  EXPECT_THAT(between_steps.verdict->message(), Not(HasSubstr("last seen")));
}

TEST(Coordinator, ARanksOwnErrorComesBeforeWhatOthersSawOfIt) {
  Situation job(4);
  job.tell(ErrorCode::kTimeout, "no answer");
  job.run(Milliseconds{50});
  job.tell(ErrorCode::kPeerLost, "rank 2 left early");
  job.tell(ErrorCode::kPeerLost, "rank 3 left early after that");
  EXPECT_FALSE(job.verdict) << "rank 2 may still say why";
  job.tell(ErrorCode::kAborted, "rank 2 stopped the job: [MODEL] no loss");
  job.run(Milliseconds{50});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->message(), "rank 2 stopped the job: [MODEL] no loss");
}

TEST(Coordinator, AMismatchComesAfterARanksOwnErrorAndBeforeALoss) {
  Situation mismatch(4);
  mismatch.tell(ErrorCode::kPeerLost, "rank 2 left early");
  mismatch.tell(ErrorCode::kMismatch, "ranks make different calls");
  EXPECT_FALSE(mismatch.verdict) << "a rank that failed by itself may be why the calls differ";
  mismatch.run(Milliseconds{250});
  ASSERT_TRUE(mismatch.verdict);
  EXPECT_EQ(mismatch.verdict->message(), "ranks make different calls");
  Situation own(4);
  own.tell(ErrorCode::kMismatch, "ranks make different calls");
  own.run(Milliseconds{50});
  own.tell(ErrorCode::kAborted, "rank 2 stopped the job: [MODEL] no loss");
  own.run(Milliseconds{50});
  ASSERT_TRUE(own.verdict);
  EXPECT_EQ(own.verdict->message(), "rank 2 stopped the job: [MODEL] no loss");
}

TEST(Coordinator, ALossIsBelievedAfterAMoment) {
  Situation job(4);
  job.tell(ErrorCode::kTimeout, "no answer");
  job.tell(ErrorCode::kPeerLost, "rank 2 was killed");
  job.tell(ErrorCode::kPeerLost, "rank 3 left early");
  EXPECT_EQ(job.last_word(), "rank 2 was killed") << "of a hub that ends now";
  job.run(Milliseconds{100});
  EXPECT_FALSE(job.verdict);
  job.run(Milliseconds{100});
  ASSERT_TRUE(job.verdict);
  EXPECT_EQ(job.verdict->message(), "rank 2 was killed") << "the first of its class";
}

TEST(Coordinator, OneVerdictIsEnough) {
  Situation job(2);
  job.wait(0, "a", {1});
  job.wait(1, "b", {0});
  job.run(Milliseconds{5'000});
  ASSERT_TRUE(job.verdict);
  job.verdict.reset();
  job.run(Milliseconds{20'000});
  EXPECT_FALSE(job.verdict);
  EXPECT_THAT(job.notes, IsEmpty());
}

TEST(Coordinator, ManyMissingRanksAreCountedNotListed) {
  Situation job(40);
  job.wait(0, "barrier#1", {}, Milliseconds{4'000});
  for (int rank = 1; rank < 40; ++rank) job.compute(rank, Phase::kForward, 1);
  job.run(Milliseconds{2'500});
  ASSERT_EQ(job.notes.size(), 1U);
  EXPECT_THAT(job.notes[0], AllOf(HasSubstr("rank 1 "), HasSubstr("and 35 more"), Not(HasSubstr("rank 17 "))));
}

}  // namespace
}  // namespace zeroth::detail
