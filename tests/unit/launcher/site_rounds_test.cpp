// What the hub between sites decides: rounds, sites that are lost, late or back, and who is told.
#include "hosts/site_rounds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using ::testing::HasSubstr;
using TimePoint = SiteRounds::TimePoint;

constexpr int kRanks = 2;

SiteBytes bytes_of(const std::string& text) {
  return std::make_shared<const std::string>(text);
}

/// A hub with sites of two ranks; time stands still until it is told to go on.
class Hub {
 public:
  explicit Hub(int sites) : rounds(sites), starts_(static_cast<std::size_t>(sites), 0) {}

  void come(int site, const std::string& job = "first") {
    for (int rank = 0; rank < kRanks; ++rank) come_one(site, rank, job);
  }
  SiteRounds::Arrival come_one(int site, int rank, const std::string& job = "first", int ranks = kRanks) {
    const SiteRounds::Arrival arrival = rounds.come({.site = site,
                                                     .rank = rank,
                                                     .num_ranks = ranks,
                                                     .timeout = Milliseconds{1'000},
                                                     .job = job,
                                                     .name = "pid " + std::to_string(10 * site + rank)},
                                                    now);
    if (arrival.refusal.empty()) starts_[static_cast<std::size_t>(site)] = arrival.start;
    return arrival;
  }
  [[nodiscard]] SiteMember member(int site, int rank) const {
    return {.site = site, .rank = rank, .start = starts_[static_cast<std::size_t>(site)]};
  }
  void put_one(int site, int rank, std::uint64_t round, std::uint64_t about = 0) {
    rounds.put(member(site, rank), round, about, bytes_of("m"), now);
  }
  void put(int site, std::uint64_t round) {
    for (int rank = 0; rank < kRanks; ++rank) put_one(site, rank, round);
  }
  /// Texts "1.0 round 3: sites 0, 1", in order; of other words their names.
  std::vector<std::string> said(SiteWord word) {
    std::vector<std::string> texts;
    for (const SiteAction& action : rounds.take_actions()) {
      if (action.head.word != word) continue;
      const std::string text = action.payload ? *action.payload : "";
      texts.push_back(std::to_string(action.to.site) + "." + std::to_string(action.to.rank) + " " +
                      std::to_string(action.head.round) + ": " + text_of_sites(action.head.sites) +
                      (text.empty() ? "" : "; " + text));
    }
    return texts;
  }
  void all_come(int sites) {
    for (int site = 0; site < sites; ++site) come(site);
    (void)rounds.take_actions();
  }

  SiteRounds rounds;
  TimePoint now{};

 private:
  std::vector<std::uint64_t> starts_;
};

using Texts = std::vector<std::string>;

TEST(SiteRounds, NobodyIsWelcomeBeforeAllRanksOfAllSitesHaveCome) {
  Hub hub(2);
  hub.come(0);
  (void)hub.come_one(1, 0);
  EXPECT_EQ(hub.said(SiteWord::kWelcome), Texts{});
  EXPECT_EQ(hub.rounds.missing(), site_bit(1));
  (void)hub.come_one(1, 1);
  EXPECT_EQ(hub.said(SiteWord::kWelcome).size(), 4U);
}

TEST(SiteRounds, ARoundIsDecidedOnceByAllRanks) {
  Hub hub(2);
  hub.all_come(2);
  hub.put(0, 0);
  hub.put_one(1, 0, 0);
  EXPECT_EQ(hub.said(SiteWord::kRound), Texts{});
  hub.put_one(1, 1, 0);
  EXPECT_EQ(hub.said(SiteWord::kRound),
            (Texts{"0.0 0: sites 0, 1", "0.1 0: sites 0, 1", "1.0 0: sites 0, 1", "1.1 0: sites 0, 1"}));
}

TEST(SiteRounds, MessagesGoToTheRanksOfTheirNumber) {
  Hub hub(3);
  hub.all_come(3);
  hub.put_one(1, 1, 0);
  EXPECT_EQ(hub.said(SiteWord::kMessage), (Texts{"0.1 0: no site; m", "2.1 0: no site; m"}));
}

TEST(SiteRounds, ASiteThatHasSentAPartIsLeftOutByAll) {
  Hub hub(3);
  hub.all_come(3);
  hub.put(0, 0);
  hub.put_one(1, 0, 0);
  hub.put(2, 0);
  hub.rounds.closed(hub.member(1, 1), "has closed its connection", hub.now);
  const std::vector<SiteAction> actions = hub.rounds.take_actions();
  int decided = 0;
  int dismissed = 0;
  for (const SiteAction& action : actions) {
    if (action.head.word == SiteWord::kRound) {
      ++decided;
      EXPECT_EQ(action.head.sites, site_bit(0) | site_bit(2));
      EXPECT_THAT(*action.payload, HasSubstr("site 1 is lost: its rank 1 (pid 11) has closed its connection"));
    }
    if (action.head.word == SiteWord::kDismissed) {
      ++dismissed;  // the other rank of the site
      EXPECT_EQ(action.to.site, 1);
      EXPECT_EQ(action.to.rank, 0);
    }
  }
  EXPECT_EQ(decided, 4);
  EXPECT_EQ(dismissed, 1);
  hub.put_one(1, 0, 0);  // it is too late
  hub.put(0, 1);
  hub.put(2, 1);
  EXPECT_EQ(hub.said(SiteWord::kRound).size(), 4U);
}

TEST(SiteRounds, ASiteThatDiesAfterAllItsMessagesIsInTheRound) {
  Hub hub(2);
  hub.all_come(2);
  hub.put(1, 0);
  hub.rounds.closed(hub.member(1, 0), "has ended", hub.now);
  (void)hub.rounds.take_actions();
  hub.put(0, 0);
  const Texts first = hub.said(SiteWord::kRound);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_THAT(first[0], HasSubstr("0.0 0: sites 0, 1; site 1 is lost"));
  hub.put(0, 1);
  EXPECT_EQ(hub.said(SiteWord::kRound), (Texts{"0.0 1: site 0", "0.1 1: site 0"}));
}

TEST(SiteRounds, ALateSiteIsLostAfterTheDeadline) {
  Hub hub(2);
  hub.all_come(2);
  hub.put_one(1, 0, 0);
  EXPECT_EQ(hub.rounds.due(), std::nullopt);
  hub.put(0, 0);
  (void)hub.rounds.take_actions();
  ASSERT_EQ(hub.rounds.due(), hub.now + Milliseconds{1'000});
  hub.rounds.tick(hub.now + Milliseconds{999});
  EXPECT_EQ(hub.rounds.take_actions().size(), 0U);
  hub.rounds.tick(hub.now + Milliseconds{1'000});
  const Texts decided = hub.said(SiteWord::kRound);
  ASSERT_EQ(decided.size(), 2U);
  EXPECT_THAT(decided[0], HasSubstr("site 0; site 1 is lost: it has not come to the exchange within 1 s"));
}

/// Site 1 of three is lost, and has come again; sites 0 and 2 are about to put round 1.
class Back : public ::testing::Test {
 protected:
  Back() {
    hub.all_come(3);
    hub.rounds.closed(hub.member(1, 0), "has ended", hub.now);
    hub.put(0, 0);
    hub.put(2, 0);
    (void)hub.rounds.take_actions();
    hub.come(1, "second");
  }
  void give(int site, int rank, std::uint64_t round, std::uint64_t start = 2) {
    hub.rounds.state_for(hub.member(site, rank), 1, start, round, bytes_of("state"), hub.now);
  }

  Hub hub{3};
};

TEST_F(Back, ItIsToldThatOthersTrainAndIsInNoRoundYet) {
  EXPECT_EQ(hub.said(SiteWord::kWelcome).size(), 2U);
  hub.put(0, 1);
  hub.put(2, 1);
  const std::vector<SiteAction> actions = hub.rounds.take_actions();
  int asked = 0;
  for (const SiteAction& action : actions) {
    if (action.head.word == SiteWord::kJoiner) {
      ++asked;
      EXPECT_EQ(action.to.site, 0);
      EXPECT_EQ(action.head.site, 1);
      EXPECT_EQ(action.head.value, 2U);
    }
    if (action.head.word == SiteWord::kRound) {
      EXPECT_EQ(action.head.sites, site_bit(0) | site_bit(2));
    }
  }
  EXPECT_EQ(asked, kRanks);
}

TEST_F(Back, ItIsInTheRoundAfterItsStateWithMessagesThatCameBefore) {
  hub.put(0, 1);
  hub.put(2, 1);
  hub.put(2, 2);  // faster than site 0, which is to give its state
  (void)hub.rounds.take_actions();
  give(0, 0, 2);
  EXPECT_EQ(hub.said(SiteWord::kState), Texts{});  // not before all ranks have given theirs
  give(0, 1, 2);
  const std::vector<SiteAction> actions = hub.rounds.take_actions();
  int messages = 0;
  for (const SiteAction& action : actions) messages += action.head.word == SiteWord::kMessage ? 1 : 0;
  EXPECT_EQ(messages, kRanks);
  hub.put(0, 2);
  EXPECT_EQ(hub.said(SiteWord::kRound), Texts{});  // it waits for the site that is back
  hub.put(1, 2);
  const Texts decided = hub.said(SiteWord::kRound);
  ASSERT_EQ(decided.size(), 6U);
  EXPECT_THAT(decided[0], HasSubstr("0.0 2: sites 0, 1, 2; site 1 is back"));
}

TEST_F(Back, AnotherSiteIsAskedWhenTheFirstIsLost) {
  hub.put(0, 1);
  hub.put(2, 1);
  give(0, 0, 2);
  hub.rounds.closed(hub.member(0, 1), "has ended", hub.now);
  (void)hub.rounds.take_actions();
  give(0, 1, 2);  // of a site that is lost
  hub.put(2, 2);
  EXPECT_EQ(hub.said(SiteWord::kJoiner).size(), 2U);
  give(2, 0, 3);
  give(2, 1, 3);
  EXPECT_EQ(hub.said(SiteWord::kState).size(), 2U);
  EXPECT_EQ(hub.rounds.present(), site_bit(1) | site_bit(2));
}

TEST_F(Back, AStateForAnEarlierStartIsOfNoUse) {
  hub.put(0, 1);
  hub.put(2, 1);
  hub.rounds.closed(hub.member(1, 1), "has ended", hub.now);
  hub.come(1, "third");
  (void)hub.rounds.take_actions();
  give(0, 0, 2, 2);
  give(0, 1, 2, 2);
  EXPECT_EQ(hub.said(SiteWord::kState), Texts{});
  hub.put(0, 2);
  hub.put(2, 2);
  EXPECT_EQ(hub.said(SiteWord::kJoiner).size(), 2U);
  give(0, 0, 3, 2);
  give(0, 1, 3, 2);
  EXPECT_EQ(hub.said(SiteWord::kState), Texts{});
  give(0, 0, 3, 3);
  give(0, 1, 3, 3);
  EXPECT_EQ(hub.said(SiteWord::kState).size(), 2U);
}

TEST_F(Back, ItIsSentAwayWhenTheOthersAreLostOrHaveEnded) {
  hub.rounds.closed(hub.member(0, 0), "has ended", hub.now);
  (void)hub.rounds.take_actions();
  hub.rounds.bye(hub.member(2, 0), hub.now);
  hub.rounds.bye(hub.member(2, 1), hub.now);
  const Texts gone = hub.said(SiteWord::kDismissed);
  ASSERT_EQ(gone.size(), 2U);
  EXPECT_THAT(gone[0], HasSubstr("the other sites have ended this training"));
  EXPECT_THAT(hub.come_one(0, 0, "late").refusal, HasSubstr("have ended this training"));
}

TEST(SiteRounds, WhenAllAreLostTheTrainingBeginsAgain) {
  Hub hub(2);
  hub.all_come(2);
  hub.put(0, 0);
  hub.rounds.closed(hub.member(0, 0), "has ended", hub.now);
  hub.come(0, "second");
  hub.rounds.closed(hub.member(1, 0), "has ended", hub.now);
  const Texts gone = hub.said(SiteWord::kDismissed);  // site 0 had been told that it joins
  EXPECT_THAT(gone, ::testing::Contains(HasSubstr("0.1 0: no site; all sites that were training are lost")));
  hub.come(0, "third");
  EXPECT_EQ(hub.said(SiteWord::kWelcome), Texts{});
  hub.come(1, "second");
  EXPECT_EQ(hub.said(SiteWord::kWelcome).size(), 4U);
  hub.put(0, 0);
  hub.put(1, 0);
  EXPECT_EQ(hub.said(SiteWord::kRound).size(), 4U);
}

TEST(SiteRounds, OtherExchangesAndOtherNumbersOfRanksAreRefused) {
  Hub hub(2);
  hub.come(0);
  EXPECT_THAT(hub.come_one(1, 0, "first", 3).refusal, HasSubstr("site 1 has 3 ranks, and the other sites 2"));
  EXPECT_THAT(hub.come_one(2, 0).refusal, HasSubstr("there is no site 2"));
  EXPECT_THAT(hub.come_one(0, 0).refusal, HasSubstr("came twice"));
  hub.come(1);
  (void)hub.rounds.take_actions();
  hub.put_one(0, 0, 0, 1);
  hub.put_one(1, 0, 0, 2);
  const Texts failed = hub.said(SiteWord::kDismissed);
  ASSERT_EQ(failed.size(), 4U);
  EXPECT_THAT(failed[0], HasSubstr("sites make different exchanges: rank 0 (pid 10) of site 1"));
}

}  // namespace
}  // namespace zeroth
