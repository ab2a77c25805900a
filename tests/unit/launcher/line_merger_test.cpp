#include "launcher/line_merger.h"

#include "hosts/rank_list.h"

#include <gtest/gtest.h>

#include <string>

namespace zeroth::launcher {
namespace {

class LineMergerTest : public ::testing::Test {
 protected:
  void add(int rank, const std::string& line, int at_ms = 0) { merger.add(rank, line, start + Milliseconds{at_ms}); }
  std::string flushed(int at_ms) {
    merger.flush(start + Milliseconds{at_ms});
    return std::exchange(sink.queue(), "");
  }

  OutputSink sink{-1};
  LineMerger merger{sink, 4};
  LineMerger::TimePoint start = SteadyClock::now();
};

TEST(DescribeRanks, RunsAreJoined) {
  EXPECT_EQ(describe_ranks({3}), "3");
  EXPECT_EQ(describe_ranks({0, 1}), "0-1");
  EXPECT_EQ(describe_ranks({0, 2, 3, 4, 9, 11, 12}), "0,2-4,9,11-12");
}

TEST_F(LineMergerTest, TheSameLineOfSeveralRanksIsWrittenOnce) {
  add(2, "same\n");
  add(0, "same\n", 40);
  add(1, "own\n", 50);
  EXPECT_EQ(flushed(99), "");
  EXPECT_EQ(flushed(100), "[ranks 0,2] same\n");
  EXPECT_EQ(flushed(149), "");
  EXPECT_EQ(flushed(150), "[1] own\n");
  EXPECT_EQ(merger.next(), std::nullopt);
}

TEST_F(LineMergerTest, ALineOfAllRanksDoesNotWait) {
  for (const int rank : {3, 1, 0, 2}) add(rank, "all\r");
  EXPECT_EQ(flushed(0), "[ranks 0-3] all\r");
}

TEST_F(LineMergerTest, TheLinesOfARankStayInOrder) {
  add(0, "a\n");
  add(0, "b\n");
  add(1, "b\n");
  add(1, "a\n");  // not that of rank 0: rank 1 has written b before it
  add(0, "b\n");  // a second b of rank 0
  merger.flush_all();
  EXPECT_EQ(sink.queue(), "[0] a\n[ranks 0-1] b\n[1] a\n[0] b\n");
}

TEST_F(LineMergerTest, LongLinesDoNotWaitByTheHundred) {
  const std::string line(60'000, 'x');
  for (int i = 0; i < 100; ++i) add(0, line);
  EXPECT_GT(sink.queue().size(), 100 * line.size() - (std::size_t{1} << 20));
}

TEST_F(LineMergerTest, AFloodDoesNotWait) {
  for (int line = 0; line < 3000; ++line) add(0, std::to_string(line) + "\n");
  const std::string text = flushed(0);
  EXPECT_EQ(text.substr(0, 14), "[0] 0\n[0] 1\n[0");
  EXPECT_NE(text.find("[0] 1900\n"), std::string::npos);
  EXPECT_EQ(merger.next(), start + kMergeWindow);
}

}  // namespace
}  // namespace zeroth::launcher
