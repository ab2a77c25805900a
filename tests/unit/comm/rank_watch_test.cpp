// What a rank says of its waits, and what it is told of the job.
#include <zeroth/comm/rank_watch.h>

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

TEST(RankWatch, AWaitIsSeenFromItsFirstLookOnWithAllThatItIsFor) {
  RankWatch watch(0, 2);
  std::vector<WaitStatus> seen;
  watch.set_waker([&] { seen.push_back(watch.status(false).wait); });
  {
    WatchedWait wait(&watch);
    EXPECT_EQ(watch.status(false).wait.id, 0U) << "a short wait leaves no trace";
    wait.look(report);
    wait.look(report);
    EXPECT_EQ(watch.status(false).wait.looks, 2U);
  }
  EXPECT_EQ(watch.status(false).wait.id, 0U);
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_EQ(seen[0].report.call, "barrier#1");
  EXPECT_EQ(seen[0].report.ranks, std::vector{1});
  EXPECT_EQ(seen[0].report.timeout, Milliseconds{60'000}) << "of 0 ms a quarter would be over";
}

void load_batch(RankWatch& watch) {
  watch.at();
}

TEST(RankWatch, ANativeProgramSaysWhereItIs) {
  RankWatch watch(0, 2);
  EXPECT_EQ(watch.status(true).place, "");
  const std::uint_least32_t line = std::source_location::current().line();
  watch.at();
  EXPECT_EQ(watch.status(false).place, "") << "asked for only when it is needed";
  EXPECT_EQ(watch.status(true).place, "rank_watch_test.cpp:" + std::to_string(line + 1) + " in TestBody");
  load_batch(watch);
  EXPECT_EQ(watch.status(true).place.substr(0, 20), "rank_watch_test.cpp:");
  EXPECT_EQ(watch.status(true).place.substr(watch.status(true).place.find(" in ")), " in load_batch");
  watch.set_locator([](pid_t) { return "train.py:57 in main"; });
  EXPECT_EQ(watch.status(true).place, "train.py:57 in main");
}

TEST(RankWatch, AGoodbyeAsksNobody) {
  RankWatch watch(0, 2);
  watch.at();
  watch.enter(Phase::kBetweenSteps);
  watch.finish_step(3);
  watch.set_locator([](pid_t) -> std::string { throw std::runtime_error("asked"); });
  const RankStatus last = watch.goodbye();
  EXPECT_EQ(last.step, 3);
  EXPECT_EQ(last.phase, Phase::kBetweenSteps);
  EXPECT_EQ(last.place.substr(0, 20), "rank_watch_test.cpp:");
}

TEST(RankWatch, AnErrorOfThisRankSaysItsStep) {
  RankWatch watch(1, 4);
  const auto who = [&](std::string told) {
    return watch.dated(Error(ErrorCode::kPeerLost, "rank 2 was killed", {.who = std::move(told)})).context().who;
  };
  EXPECT_EQ(who("rank 1/4"), "rank 1/4") << "nothing has been trained";
  watch.finish_step(119);
  watch.enter(Phase::kForward);
  EXPECT_EQ(who("rank 1/4"), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who(""), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who("rank 1/4, step 120 (forward)"), "rank 1/4, step 120 (forward)");
  EXPECT_EQ(who("rank 2/4"), "rank 2/4") << "it is about another one, or another group";
  watch.enter(Phase::kBetweenSteps);
  EXPECT_EQ(who("rank 1/4"), "rank 1/4, after step 119");
  watch.judge(Error(ErrorCode::kTimeout, "no answer"));
  try {
    watch.check();
    FAIL();
  } catch (const JobVerdict& verdict) {
    EXPECT_EQ(verdict.context().who, "rank 1/4, after step 119");
  }
}

TEST(RankWatch, ARecordHoldsTheErrorAndWhereTheRankWas) {
  RankWatch watch(1, 4);
  watch.enter(Phase::kForward, watch.add_model({"root"}), 0);
  watch.finish_step(3);
  WatchedWait wait(&watch);
  wait.look(report);
  const std::string path = testing::TempDir() + "/rank-watch-record";
  watch.write_record(path, Error(ErrorCode::kTimeout, "no answer", {.hint = "look"}), watch.status(false));
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

TEST(RankWatch, AVerdictIsAwaitedOnlyWhereSomebodyCouldSayOne) {
  RankWatch watch(0, 2);
  const auto begin = SteadyClock::now();
  watch.await_verdict(Milliseconds{60'000});
  EXPECT_LT(SteadyClock::now() - begin, Milliseconds{30'000});
  watch.set_waker([] {});
  watch.await_verdict(Milliseconds{20});
  std::thread judge([&] {
    std::this_thread::sleep_for(Milliseconds{20});
    watch.judge(Error(ErrorCode::kPeerLost, "rank 1 was killed"));
  });
  EXPECT_THROW(watch.await_verdict(Milliseconds{60'000}), JobVerdict);
  judge.join();
}

TEST(RankWatch, IsDeafUntilItsProgramHasHadAnErrorOnce) {
  const auto deaf_after = [](const std::function<void(RankWatch&)>& happens) {
    RankWatch watch(0, 2);
    watch.take_group();
    watch.judge(Error(ErrorCode::kTimeout, "rank 1 does not come"));
    EXPECT_TRUE(watch.is_deaf());
    happens(watch);
    return watch.is_deaf();
  };
  RankWatch sound(0, 2);
  sound.take_group();
  EXPECT_FALSE(sound.is_deaf()) << "there is no verdict";
  EXPECT_TRUE(deaf_after([](RankWatch& watch) { WatchedWait wait(&watch); })) << "a wait that ends well says nothing";
  EXPECT_FALSE(deaf_after([](RankWatch& watch) { EXPECT_THROW(watch.check(), JobVerdict); }));
  EXPECT_FALSE(deaf_after([](RankWatch& watch) {
    try {
      WatchedWait wait(&watch);
      throw Error(ErrorCode::kPeerLost, "what the transport saw by itself");
    } catch (const Error&) {
      watch.add_waited({});
    }
  }));
  EXPECT_FALSE(deaf_after([](RankWatch& watch) { watch.hear(); }));
  EXPECT_FALSE(deaf_after([](RankWatch& watch) { watch.give_group(); })) << "it needs nobody any more";
  EXPECT_FALSE(deaf_after([](RankWatch& watch) { watch.spare(); }));
}

TEST(RankWatch, AVerdictSaysWhomItIsAbout) {
  const auto thrown = [](RankWatch& watch) -> std::string {
    try {
      watch.check();
    } catch (const JobVerdict& verdict) {
      return verdict.context().who;
    }
    return "nothing";
  };
  RankWatch named(0, 4);
  named.judge(Error(ErrorCode::kOutOfMemory, "the plan does not fit", {.who = "rank 2/4"}));
  EXPECT_EQ(thrown(named), "rank 2/4");
  RankWatch unnamed(3, 4);
  EXPECT_EQ(thrown(unnamed), "nothing");
  unnamed.judge(Error(ErrorCode::kTimeout, "no answer"));
  EXPECT_EQ(thrown(unnamed), "rank 3/4");
}

}  // namespace
}  // namespace zeroth
