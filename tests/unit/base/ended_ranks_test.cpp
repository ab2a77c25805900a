#include <zeroth/base/ended_ranks.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth {
namespace {

TEST(EndedRanks, AreReadAsTheyAreWritten) {
  const std::vector<EndedRank> ranks{{.rank = 3, .pid = 4711, .exit_code = 0, .host = ""},
                                     {.rank = 1, .pid = 77, .exit_code = 75, .host = "node2"}};
  std::string text = head_of_ended_ranks("7f3a", 4);
  for (const EndedRank& rank : ranks) text += line_of(rank);
  EXPECT_EQ(ended_ranks_in(text, "7f3a", 4), ranks);
  EXPECT_EQ(ended_ranks_in(text, "7f3a.shm", 4), ranks) << "a world of the same job";
}

TEST(EndedRanks, OfAnotherJobAreNone) {
  const std::string text = head_of_ended_ranks("7f3a", 4) + line_of({.rank = 1, .pid = 7});
  EXPECT_TRUE(ended_ranks_in(text, "other", 4).empty());
  EXPECT_TRUE(ended_ranks_in(text, "7f3a", 2).empty()) << "a job inside of a rank";
  for (const std::string broken : {"", "\n", "job", "job 7f3a\n1 7 0\n", "1 7 0\n", "ranks 7f3a 4\n1 7 0\n"})
    EXPECT_TRUE(ended_ranks_in(broken, "7f3a", 4).empty()) << broken;
}

TEST(EndedRanks, ALineThatIsNotWholeOrNoneIsLeftOut) {
  const std::string text = head_of_ended_ranks("7f3a", 4) + "x y z\n2 8 0 node1\n1 7 0";
  EXPECT_EQ(ended_ranks_in(text, "7f3a", 4),
            (std::vector<EndedRank>{{.rank = 2, .pid = 8, .exit_code = 0, .host = "node1"}}));
}

}  // namespace
}  // namespace zeroth
