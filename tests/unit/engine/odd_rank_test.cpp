// The odd one is to blame.
#include "engine/odd_rank.h"

#include <gtest/gtest.h>

#include <vector>

namespace zeroth {
namespace {

TEST(OddRank, IsTheOneThatMostDifferFrom) {
  struct Row {
    std::vector<std::int64_t> values;
    int usual;
    int odd;
  };
  for (const Row& row :
       {Row{{5}, 0, -1}, Row{{5, 5, 5}, 0, -1}, Row{{5, 5, 6}, 0, 2}, Row{{6, 5, 5}, 1, 0}, Row{{5, 6, 5, 5}, 0, 1},
        Row{{6, 5, 6, 5, 5}, 1, 0}, Row{{5, 6}, 0, 1}, Row{{6, 6, 5, 5}, 0, 2}, Row{{1, 2, 3}, 0, 1}}) {
    const OddRank found = find_odd_rank(row.values);
    EXPECT_EQ(found.usual, row.usual);
    EXPECT_EQ(found.odd, row.odd);
  }
}

}  // namespace
}  // namespace zeroth
