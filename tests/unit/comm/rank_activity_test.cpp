// What a rank says of its waits, and what it is told of the job.
#include <zeroth/comm/rank_activity.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

WaitReport report() {
  return {.group = "world", .call = "barrier#1", .ranks = {1}, .timeout = Milliseconds{60'000}};
}

TEST(RankActivity, AWaitIsSeenFromItsFirstLookOnWithAllThatItIsFor) {
  RankActivity activity(0, 2);
  std::vector<WaitStatus> seen;
  activity.set_waker([&] { seen.push_back(activity.status(false).wait); });
  {
    WatchedWait wait(&activity);
    EXPECT_EQ(activity.status(false).wait.id, 0U) << "a short wait leaves no trace";
    wait.look(report);
    wait.look(report);
    EXPECT_EQ(activity.status(false).wait.looks, 2U);
  }
  EXPECT_EQ(activity.status(false).wait.id, 0U);
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].report.call, "barrier#1");
  EXPECT_EQ(seen[0].report.ranks, std::vector{1});
  EXPECT_EQ(seen[0].report.timeout, Milliseconds{60'000}) << "of 0 ms a quarter would be over";
}

void load_batch(RankActivity& activity) {
  activity.at();
}

TEST(RankActivity, ANativeProgramSaysWhereItIs) {
  RankActivity activity(0, 2);
  EXPECT_EQ(activity.status(true).place, "");
  const std::uint_least32_t line = std::source_location::current().line();
  activity.at();
  EXPECT_EQ(activity.status(false).place, "") << "asked for only when it is needed";
  EXPECT_EQ(activity.status(true).place, "rank_activity_test.cpp:" + std::to_string(line + 1) + " in TestBody");
  load_batch(activity);
  EXPECT_EQ(activity.status(true).place.substr(0, 23), "rank_activity_test.cpp:");
  EXPECT_EQ(activity.status(true).place.substr(activity.status(true).place.find(" in ")), " in load_batch");
  activity.set_locator([](pid_t) { return "train.py:57 in main"; });
  EXPECT_EQ(activity.status(true).place, "train.py:57 in main");
}

TEST(RankActivity, AGoodbyeAsksNobody) {
  RankActivity activity(0, 2);
  activity.at();
  activity.enter(Phase::kBetweenSteps);
  activity.finish_step(3);
  activity.set_locator([](pid_t) -> std::string { throw std::runtime_error("asked"); });
  const RankStatus last = activity.goodbye();
  EXPECT_EQ(last.step, 3);
  EXPECT_EQ(last.phase, Phase::kBetweenSteps);
  EXPECT_EQ(last.place.substr(0, 23), "rank_activity_test.cpp:");
}

TEST(RankActivity, AnErrorOfThisRankSaysItsStep) {
  RankActivity activity(1, 4);
  const auto who = [&](std::string told) {
    return activity.dated(Error(ErrorCode::kPeerLost, "rank 2 was killed", {.who = std::move(told)})).context().who;
  };
  EXPECT_EQ(who("rank 1/4"), "rank 1/4") << "nothing has been trained";
  activity.finish_step(119);
  activity.enter(Phase::kForward);
  EXPECT_EQ(who("rank 1/4"), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who(""), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who("rank 1/4, step 120 (forward)"), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who("rank 2/4"), "rank 2/4") << "it is about another one, or another group";
  activity.enter(Phase::kBetweenSteps);
  EXPECT_EQ(who("rank 1/4"), "rank 1/4, after step 119");
  activity.judge(Error(ErrorCode::kTimeout, "no answer"));
  try {
    activity.check();
    FAIL();
  } catch (const JobVerdict& verdict) {
    EXPECT_EQ(verdict.context().who, "rank 1/4, after step 119");
  }
}

ActionText read_action(ActionWord action) {
  return {.name = "1B" + std::to_string(action % 100), .about = "stage 1 of 2", .trains = action < 100};
}

TEST(RankActivity, AnActionIsInTheStatusInErrorsAndInSharedMemory) {
  RankActivity activity(1, 4);
  ShownAction shown{};
  activity.show_at(shown);
  activity.finish_step(2);
  activity.enter_action(3, Phase::kBackward);
  EXPECT_EQ(activity.status(false).action, "") << "nobody can read it";
  activity.set_action_reader(&read_action);
  const int model = activity.add_model({"root"});
  const auto who = [&] { return activity.dated(Error(ErrorCode::kPeerLost, "rank 2 was killed")).context().who; };
  EXPECT_EQ(describe_phase(activity.status(false)), "is in action 1B3 of step 3 (stage 1 of 2)");
  EXPECT_EQ(who(), "rank 1/4, step 3 (1B3)");
  EXPECT_EQ(activity.action_text(shown.action, shown.steps), "action 1B3 of step 3 (stage 1 of 2)");
  activity.enter(Phase::kBackward, model, 0);
  EXPECT_EQ(describe_phase(activity.status(false)), "is in action 1B3 of step 3 (stage 1 of 2), in unit root");
  activity.enter_action(105, Phase::kEvaluation);
  EXPECT_EQ(describe_phase(activity.status(false)), "is in action 1B5 of an evaluation after step 2 (stage 1 of 2)")
      << "and no more in that unit";
  EXPECT_EQ(who(), "rank 1/4, after step 2 (1B5)");
  activity.leave_action(Phase::kBetweenSteps);
  EXPECT_EQ(describe_phase(activity.status(false)), "is between steps, after step 2");
  EXPECT_EQ(activity.action_text(shown.action, shown.steps), "");
  activity.enter_action(3, Phase::kBackward);
  activity.hide_at(shown);
  activity.enter_action(4, Phase::kBackward);
  EXPECT_EQ(shown.action.load(), 3U);
}

TEST(RankActivity, AFailedActionIsKnownUntilTheNextOne) {
  RankActivity activity(1, 4);
  activity.set_action_reader(&read_action);
  activity.enter_action(3, Phase::kBackward);
  EXPECT_EQ(activity.failed_action(), "");
  activity.fail_action();
  EXPECT_EQ(activity.failed_action(), "action 1B3 of step 1 (stage 1 of 2)");
  EXPECT_EQ(activity.status(false).action, "action 1B3 of step 1 (stage 1 of 2), which has failed");
  activity.enter_action(4, Phase::kBackward);
  EXPECT_EQ(activity.failed_action(), "");
}

TEST(RankActivity, ARecordHoldsTheErrorAndWhereTheRankWas) {
  RankActivity activity(1, 4);
  activity.enter(Phase::kForward, activity.add_model({"root"}), 0);
  activity.finish_step(3);
  WatchedWait wait(&activity);
  wait.look(report);
  const std::string path = testing::TempDir() + "/rank-activity-record";
  activity.write_record(path, Error(ErrorCode::kTimeout, "no answer", {.hint = "look"}), activity.status(false));
  std::string head;
  std::getline(std::ifstream(path), head);
  std::filesystem::remove(path);
  auto failure = nlohmann::json::parse(head).at("failure");
  EXPECT_EQ(failure.at("time").get<std::string>().size(), std::string("2026-11-24T12:00:00Z").size());
  failure.erase("time");
  EXPECT_EQ(failure, (nlohmann::json{{"code", "TIMEOUT"},
                                     {"message", "no answer"},
                                     {"hint", "look"},
                                     {"who", "rank 1/4"},
                                     {"steps", "3"},
                                     {"rank_was", "is in the forward of unit root of step 4"},
                                     {"waited_for", "barrier#1"},
                                     {"group", "world"}}));
}

TEST(RankActivity, AVerdictIsAwaitedOnlyWhereSomebodyCouldSayOne) {
  RankActivity activity(0, 2);
  const auto begin = SteadyClock::now();
  activity.await_verdict(Milliseconds{60'000});
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{30'000});
  activity.set_waker([] {});
  activity.await_verdict(Milliseconds{20});
  std::thread judge([&] {
    std::this_thread::sleep_for(Milliseconds{20});
    activity.judge(Error(ErrorCode::kPeerLost, "rank 1 was killed"));
  });
  EXPECT_THROW(activity.await_verdict(Milliseconds{60'000}), JobVerdict);
  judge.join();
}

TEST(RankActivity, IsDeafUntilItsProgramHasHadAnErrorOnce) {
  const auto deaf_after = [](const std::function<void(RankActivity&)>& happens) {
    RankActivity activity(0, 2);
    activity.take_group();
    activity.judge(Error(ErrorCode::kTimeout, "rank 1 does not come"));
    EXPECT_TRUE(activity.is_deaf());
    happens(activity);
    return activity.is_deaf();
  };
  RankActivity sound(0, 2);
  sound.take_group();
  EXPECT_FALSE(sound.is_deaf()) << "there is no verdict";
  EXPECT_TRUE(deaf_after([](RankActivity& activity) { WatchedWait wait(&activity); }))
      << "a wait that ends well says nothing";
  EXPECT_FALSE(deaf_after([](RankActivity& activity) { EXPECT_THROW(activity.check(), JobVerdict); }));
  EXPECT_FALSE(deaf_after([](RankActivity& activity) {
    try {
      WatchedWait wait(&activity);
      throw Error(ErrorCode::kPeerLost, "what the transport saw by itself");
    } catch (const Error&) {
      activity.add_waited({});
    }
  }));
  EXPECT_FALSE(deaf_after([](RankActivity& activity) { activity.hear(); }));
  EXPECT_FALSE(deaf_after([](RankActivity& activity) { activity.give_group(); })) << "it needs nobody any more";
  EXPECT_FALSE(deaf_after([](RankActivity& activity) { activity.spare(); }));
}

TEST(RankActivity, AVerdictSaysWhomItIsAbout) {
  const auto thrown = [](RankActivity& activity) -> std::string {
    try {
      activity.check();
    } catch (const JobVerdict& verdict) {
      return verdict.context().who;
    }
    return "nothing";
  };
  RankActivity named(0, 4);
  named.judge(Error(ErrorCode::kOutOfMemory, "the plan does not fit", {.who = "rank 2/4"}));
  EXPECT_EQ(thrown(named), "rank 2/4");
  RankActivity unnamed(3, 4);
  EXPECT_EQ(thrown(unnamed), "nothing");
  unnamed.judge(Error(ErrorCode::kTimeout, "no answer"));
  EXPECT_EQ(thrown(unnamed), "rank 3/4");
}

}  // namespace
}  // namespace zeroth
