// What a rank takes for its processors.
#include <zeroth/base/cores.h>

#include <gtest/gtest.h>

#include <cstdlib>

namespace zeroth {
namespace {

TEST(Cores, ArePartedUnlessTheyAreTheRanksOwn) {
  EXPECT_EQ(cores_of_rank(8, false, 2), 4);
  EXPECT_EQ(cores_of_rank(7, false, 2), 3);
  EXPECT_EQ(cores_of_rank(2, false, 3), 0);
  EXPECT_EQ(cores_of_rank(4, true, 2), 4);
  EXPECT_EQ(cores_of_rank(1, true, 64), 1);
}

TEST(Cores, TheLauncherSaysWhoseTheyAre) {
  ::unsetenv("ZEROTH_BOUND_CORES");
  const int all = cores_of_this_rank(1);
  EXPECT_GE(all, 1);
  EXPECT_EQ(cores_of_this_rank(all + 1), 0);
  ::setenv("ZEROTH_BOUND_CORES", "1", 1);
  EXPECT_EQ(cores_of_this_rank(all + 1), all);
  ::unsetenv("ZEROTH_BOUND_CORES");
}

}  // namespace
}  // namespace zeroth
