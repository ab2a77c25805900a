// The rows that stand for a product of factors in the tests of every room.
#include "support/covering_array.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

namespace zeroth::test {
namespace {

/// The combinations of levels of `strength` factors that rows have.
std::set<covering::Tuple> combinations(const std::vector<FactorRow>& rows, const std::vector<int>& levels,
                                       int strength) {
  std::set<covering::Tuple> all;
  for (const covering::Tuple& tuple : covering::tuples_of(levels, strength)) {
    if (std::ranges::any_of(rows, [&](const FactorRow& row) { return covering::holds(row, tuple); })) all.insert(tuple);
  }
  return all;
}

TEST(CoveringArray, TuplesOfTwoFactorsAreTheProductOfEachPair) {
  EXPECT_EQ(covering::tuples_of({2, 3, 4}, 2).size(), 2U * 3 + 2 * 4 + 3 * 4);
  EXPECT_EQ(covering::tuples_of({2, 3, 4}, 3).size(), 24U);
}

RC_GTEST_PROP(CoveringArray, HasEveryCombinationThatAValidRowCanHaveAndNoRowTooMuch, ()) {
  const auto levels = *rc::gen::container<std::vector<int>>(5, rc::gen::inRange(1, 5));
  const int strength = *rc::gen::inRange(1, 4);
  const std::vector<int> least = *rc::gen::container<std::vector<int>>(3, rc::gen::inRange(0, 6));
  // Some pairs of levels cannot be, and neither can three of a kind: whole rows are lost, not single values.
  const FactorRule valid = [&](const FactorRow& row) {
    return row[0] + row[1] != least[0] && row[1] * row[2] != least[1] && row[2] + row[3] + row[4] != least[2];
  };
  const std::vector<FactorRow> grid = whole_grid(levels, valid);
  const std::vector<FactorRow> rows = covering_array(levels, strength, valid);
  for (const FactorRow& row : rows) RC_ASSERT(std::ranges::find(grid, row) != grid.end());
  const std::set<covering::Tuple> wanted = combinations(grid, levels, strength);
  RC_ASSERT(combinations(rows, levels, strength) == wanted);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    std::vector<FactorRow> others = rows;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(row));
    RC_ASSERT(combinations(others, levels, strength) != wanted);
  }
}

/// The factors of the parity suites: 8640 combinations. No array can have fewer rows than the two largest factors
/// together, 30, or the three largest, 120.
TEST(CoveringArray, IsSmall) {
  const std::vector<int> levels{3, 5, 2, 2, 6, 2, 3, 4};
  EXPECT_EQ(whole_grid(levels).size(), 8640U);
  EXPECT_LE(covering_array(levels, 2).size(), 36U);
  EXPECT_LE(covering_array(levels, 3).size(), 160U);
}

TEST(CoveringArray, GrowsSlowlyWithTheNumberOfFactors) {
  EXPECT_LE(covering_array(std::vector<int>(10, 2), 2).size(), 9U);
  EXPECT_LE(covering_array(std::vector<int>(40, 2), 2).size(), 15U);
}

/// Other machines must run the same rows: these were written down once.
TEST(CoveringArray, IsTheSameEverywhere) {
  EXPECT_EQ(covering_array({2, 2, 2}, 2), (std::vector<FactorRow>{{0, 0, 0}, {0, 1, 1}, {1, 0, 1}, {1, 1, 0}}));
  EXPECT_EQ(covering_array({3, 2, 2}, 2, [](const FactorRow& row) { return row != FactorRow{2, 1, 1}; }).size(), 6U);
}

TEST(CoveringArray, LeavesOutWhatNoRowCanHave) {
  const FactorRule never = [](const FactorRow& row) { return row[0] == 0; };
  for (const FactorRow& row : covering_array({3, 4, 2}, 2, never)) EXPECT_EQ(row[0], 0);
  EXPECT_EQ(covering_array({3, 4}, 2, [](const FactorRow&) { return false; }).size(), 0U);
}

TEST(CoveringArray, RefusesWhatHasNoMeaning) {
  EXPECT_THROW((void)covering_array({2, 2}, 3), std::invalid_argument);
  EXPECT_THROW((void)covering_array({2, 0}, 2), std::invalid_argument);
  EXPECT_THROW((void)covering_array({2, 2}, 0), std::invalid_argument);
  EXPECT_THROW((void)covering_array({}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace zeroth::test
