#include <zeroth/base/error.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/shard/flat_layout.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {
namespace {

using Ints = std::vector<int>;

TEST(PiecesOfRanks, KnownTables) {
  EXPECT_EQ(pieces_of_ranks(8, Ints{2, 4}), (Ints{0, 4, 2, 6, 1, 5, 3, 7}));
  EXPECT_EQ(pieces_of_ranks(8, Ints{2}), (Ints{0, 4, 1, 5, 2, 6, 3, 7}));
  EXPECT_EQ(pieces_of_ranks(6, Ints{3, 6}), (Ints{0, 2, 4, 1, 3, 5}));
  EXPECT_EQ(pieces_of_ranks(1, Ints{1}), (Ints{0}));
}

TEST(PiecesOfRanks, AreInRankOrderWithoutDegreesBetween) {
  for (const Ints& degrees : {Ints{}, Ints{1}, Ints{5}, Ints{1, 5}})
    EXPECT_EQ(pieces_of_ranks(5, degrees), (Ints{0, 1, 2, 3, 4}));
}

TEST(PiecesOfRanks, DegreesThatDoNotNestAreConfigurationErrors) {
  for (const Ints& degrees : {Ints{3}, Ints{8}, Ints{0}, Ints{-2}, Ints{2, 3}}) {
    try {
      (void)pieces_of_ranks(4, degrees);
      ADD_FAILURE() << degrees.front();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_TRUE(error.context().got.starts_with(std::to_string(degrees.front()))) << error.what();
    }
  }
  EXPECT_THROW((void)pieces_of_ranks(12, Ints{4, 6}), Error) << "both divide the world, but not each other";
}

/// Degrees of a world that is their product.
struct Chain {
  Ints degrees;
  int world = 1;
};

Chain any_chain() {
  Chain chain;
  const auto levels = *rc::gen::inRange(0, 4);
  for (int level = 0; level < levels; ++level) chain.degrees.push_back(chain.world *= *rc::gen::inRange(1, 5));
  chain.world *= *rc::gen::inRange(1, 4);
  return chain;
}

RC_GTEST_PROP(DegreesProperty, RunsOfRanksHaveTheWholeInPartsThatNest, ()) {
  const Chain chain = any_chain();
  const std::vector<ParamSpec> params{
      {.name = "w", .shape = {*rc::gen::inRange<std::int64_t>(0, 200 * kBlockElements)}}};
  const auto layouts =
      make_flat_layouts(params, {.name = "u", .params = {0}}, *rc::gen::inRange(0, 50), chain.world, chain.degrees);
  const FlatLayout& flat = layouts.at(0);
  Ints sorted = flat.pieces;
  std::ranges::sort(sorted);
  for (int piece = 0; piece < chain.world; ++piece) RC_ASSERT(sorted[static_cast<std::size_t>(piece)] == piece);
  int below = 1;
  for (const int degree : chain.degrees) {
    for (int rank = 0; rank < chain.world; ++rank) {
      const Range part = flat.part(rank, degree);
      const Range wider = flat.part(rank, below);
      RC_ASSERT(wider.begin <= part.begin && part.end <= wider.end);
      RC_ASSERT(part == flat.part(rank % degree, degree));
      // The ranks of the row fill the wider part, in their order.
      const SubGroup row = sub_group_of(rank, degree, below);
      RC_ASSERT(row.index_of(rank) >= 0);
      std::int64_t end = wider.begin;
      for (int index = 0; index < row.count; ++index) {
        const int member = row.rank(index);
        RC_ASSERT(member / degree == rank / degree);
        RC_ASSERT(row.index_of(member) == index);
        RC_ASSERT(flat.part(member, degree).begin == end);
        end = flat.part(member, degree).end;
      }
      RC_ASSERT(end == wider.end);
    }
    below = degree;
  }
}

RC_GTEST_PROP(DegreesProperty, PartsOfEveryDegreeAreEvenUpToABlock, ()) {
  const Chain chain = any_chain();
  const std::vector<ParamSpec> params{
      {.name = "w", .shape = {*rc::gen::inRange<std::int64_t>(0, 99) * kBlockElements}}};
  const auto layouts =
      make_flat_layouts(params, {.name = "u", .params = {0}}, *rc::gen::inRange(0, 50), chain.world, chain.degrees);
  for (const int degree : chain.degrees) {
    std::vector<std::int64_t> sizes;
    for (int rank = 0; rank < degree; ++rank) sizes.push_back(layouts.at(0).part(rank, degree).size());
    const auto [least, most] = std::ranges::minmax(sizes);
    RC_ASSERT(most - least <= kBlockElements);
  }
}

TEST(SubGroup, IsOfRanksAtEqualDistances) {
  EXPECT_EQ(sub_group_of(5, 2, 1), (SubGroup{.first = 4, .step = 1, .count = 2}));
  EXPECT_EQ(sub_group_of(5, 8, 2), (SubGroup{.first = 1, .step = 2, .count = 4}));
  EXPECT_EQ(sub_group_of(13, 8, 4), (SubGroup{.first = 9, .step = 4, .count = 2}));
  EXPECT_EQ(sub_group_of(3, 4, 4), (SubGroup{.first = 3, .step = 4, .count = 1}));
  const SubGroup row{.first = 1, .step = 2, .count = 3};
  EXPECT_EQ(row.rank(2), 5);
  EXPECT_EQ(row.index_of(5), 2);
  for (const int stranger : {-1, 0, 2, 7}) EXPECT_EQ(row.index_of(stranger), -1) << stranger;
}

}  // namespace
}  // namespace zeroth
