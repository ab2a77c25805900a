#include "trace/trace.h"

#include "support/error_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroth::trace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr std::int64_t kSecond = 1'000'000'000;

/// A rank that made `calls` calls of one second, one every two seconds, and was written at second 20.
RankTrace a_rank(int rank, int calls, const std::string& host = "h") {
  RankTrace trace{.rank = rank, .size = 3, .host = host, .now_ns = 20 * kSecond, .calls = {}};
  for (int call = 0; call < calls; ++call) {
    trace.calls.push_back({.group = "world",
                           .sequence = static_cast<std::uint64_t>(call),
                           .what = "all_gather float32 [10] unit=1 label=0",
                           .name = "all_gather",
                           .begun_ns = 2 * call * kSecond,
                           .ended_ns = (2 * call + 1) * kSecond});
  }
  return trace;
}

TEST(Trace, RanksThatMadeTheSameCallsDoNotDiffer) {
  EXPECT_THAT(differences({a_rank(0, 5), a_rank(1, 5), a_rank(2, 5)}), IsEmpty());
}

TEST(Trace, TheRankThatHasNotBegunIsNamed) {
  std::vector<RankTrace> ranks{a_rank(0, 5), a_rank(1, 4), a_rank(2, 5)};
  ranks[0].calls.back().ended_ns = ranks[2].calls.back().ended_ns = 0;
  EXPECT_THAT(differences(ranks),
              ElementsAre("world#4: ranks 0, 2 have begun all_gather float32 [10] unit=1 label=0, rank 1 has not"));
}

TEST(Trace, CallsThatDoNotMatchAreShownWithAllSides) {
  std::vector<RankTrace> ranks{a_rank(0, 5), a_rank(1, 5)};
  ranks[1].calls[3].what = "barrier uint8 [0] unit=-1 label=2";
  EXPECT_THAT(differences(ranks), ElementsAre("world#3: ranks make different calls. rank 0: all_gather float32 [10] "
                                              "unit=1 label=0; rank 1: barrier uint8 [0] unit=-1 label=2"));
}

TEST(Trace, ACallThatNobodyEnds) {
  std::vector<RankTrace> ranks{a_rank(0, 2), a_rank(1, 2)};
  ranks[0].calls.back().ended_ns = 0;
  EXPECT_THAT(differences(ranks), ElementsAre("world#1: all ranks have begun all_gather, rank 0 has not ended it"));
}

TEST(Trace, WaitsOfARankAreItsOwn) {
  std::vector<RankTrace> ranks{a_rank(0, 2), a_rank(1, 2)};
  for (const std::uint64_t number : {0U, 1U}) {  // with numbers of calls
    ranks[1].calls.push_back({.group = "world",
                              .sequence = number,
                              .what = "wait",
                              .name = "wait",
                              .about = "step() of all ranks",
                              .begun_ns = 10 * kSecond});
  }
  EXPECT_THAT(differences(ranks), IsEmpty());
  EXPECT_THAT(draw(ranks, 20.0, 20).at(1), HasSubstr(">| in wait#1 (step() of all ranks) of world for 10.0 s"));
}

TEST(Trace, NamesAreInTheFirstLineOnce) {
  const std::string head =
      R"({"rank": 0, "size": 1, "host": "h", "now_ns": 5, "names": ["a", "the parameters of unit blocks.0"]})";
  const auto call = [](int about) {
    return R"({"group": "world", "sequence": 3, "call": "all_gather", "dtype": "float32", "elements": 9, "unit": 1, "label": 1, "begun_ns": 1, "ended_ns": 2, "about": )" +
           std::to_string(about) + "}";
  };
  const RankTrace trace = parse(head + "\n" + call(1), "trace");
  EXPECT_EQ(trace.calls.at(0).what, "all_gather float32 [9] unit=1 label=1 (the parameters of unit blocks.0)");
  EXPECT_THAT(draw({trace}, 1.0, 10).at(0), HasSubstr("last all_gather#3 (the parameters of unit blocks.0) of world"));
  EXPECT_THAT(test::error_of(ErrorCode::kIo, [&] { (void)parse(head + "\n" + call(2), "trace"); }),
              HasSubstr("trace:2"));
}

TEST(Trace, WhatHasLeftARingIsNotMissed) {
  std::vector<RankTrace> ranks{a_rank(0, 9), a_rank(1, 9)};
  ranks[1].calls.erase(ranks[1].calls.begin(), ranks[1].calls.begin() + 6);
  EXPECT_THAT(differences(ranks), IsEmpty());
}

TEST(Trace, ClocksOfOtherHostsAreMoved) {
  std::vector<RankTrace> ranks{a_rank(1, 5, "far"), a_rank(0, 5)};
  for (Call& call : ranks[0].calls) {
    call.begun_ns += 500 * kSecond;
    call.ended_ns += 500 * kSecond;
  }
  ranks[0].now_ns += 500 * kSecond;
  align_clocks(ranks);
  EXPECT_EQ(ranks[1].rank, 1);
  EXPECT_EQ(ranks[1].now_ns, 20 * kSecond);
  EXPECT_EQ(ranks[1].calls[4].ended_ns, ranks[0].calls[4].ended_ns);
}

TEST(Trace, DrawsTheLastSeconds) {
  std::vector<RankTrace> ranks{a_rank(0, 6), a_rank(1, 5)};
  ranks[0].calls.back().ended_ns = 0;  // since second 10
  const std::vector<std::string> lines = draw(ranks, 20, 20);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_THAT(lines[0], HasSubstr(">>>>>>>>>>| in all_gather#5 of world for 10.0 s"));
  EXPECT_THAT(lines[1], HasSubstr("..........| last all_gather#4 of world, 11.0 s before"));
  EXPECT_THAT(lines[1], StartsWith("rank 1    |##"));
}

TEST(Trace, WhatIsNoTraceIsRefusedWithItsLine) {
  const auto refused = [](const std::string& text, const char* got) {
    EXPECT_THAT(test::error_of(ErrorCode::kIo, [&] { (void)parse(text, "f.jsonl"); }), HasSubstr(got));
  };
  refused("", "empty");
  refused("hello", "f.jsonl:1");
  refused(R"({"rank":0,"size":1,"host":"h","now_ns":1})"
          "\n{}",
          "f.jsonl:2");
  refused(R"({"rank":5,"size":1,"host":"h","now_ns":1})", "rank 5 of 1");
  refused(R"({"rank":0,"size":99999999,"host":"h","now_ns":1})", "no such rank");
}

}  // namespace
}  // namespace zeroth::trace
