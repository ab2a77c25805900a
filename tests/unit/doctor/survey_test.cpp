#include "doctor/survey.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace zeroth::doctor {
namespace {

TEST(Survey, RoundsHaveEveryPairOnceAndNoEndTwice) {
  for (int count = 0; count <= 40; ++count) {
    std::set<Pair> seen;
    const auto rounds = rounds_of(count);
    for (const auto& round : rounds) {
      std::set<int> ends;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(0 <= a && a < b && b < count) << count << ": " << a << " " << b;
        EXPECT_TRUE(seen.insert({a, b}).second) << count << ": " << a << " " << b;
        EXPECT_TRUE(ends.insert(a).second && ends.insert(b).second) << count;
      }
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(count * (count - 1) / 2));
    if (count > 8) {
      EXPECT_LE(rounds.size(), static_cast<std::size_t>(count)) << count;
    }
  }
}

}  // namespace
}  // namespace zeroth::doctor
