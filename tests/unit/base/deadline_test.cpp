#include <zeroth/base/deadline.h>

#include <gtest/gtest.h>

namespace zeroth {
namespace {

TEST(Deadline, ZeroAndPastHavePassedButSlicesStayPositive) {
  for (const Milliseconds timeout : {Milliseconds(0), Milliseconds(-5)}) {
    const Deadline deadline(timeout);
    EXPECT_TRUE(deadline.passed());
    EXPECT_EQ(deadline.remaining(), Milliseconds(0));
    EXPECT_EQ(deadline.slice(), Milliseconds(1));
    EXPECT_EQ(deadline.timeout(), timeout);
  }
}

TEST(Deadline, FarOnesAreSlicedAtAHundredMilliseconds) {
  const Deadline deadline(Milliseconds(604'800'000));
  EXPECT_FALSE(deadline.passed());
  EXPECT_EQ(deadline.slice(), kWaitSlice);
  EXPECT_LE(deadline.remaining(), deadline.timeout());
  EXPECT_GT(deadline.remaining(), deadline.timeout() - Milliseconds(60'000));
}

TEST(Deadline, NearOnesAreSlicedByWhatIsLeft) {
  const Deadline deadline(Milliseconds(50));
  EXPECT_LE(deadline.slice(), Milliseconds(50));
  EXPECT_GE(deadline.slice(), Milliseconds(1));
}

}  // namespace
}  // namespace zeroth
