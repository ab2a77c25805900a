#include "support/error_of.h"

#include <zeroth/parallel/expert_placement.h>
#include <zeroth/parallel/slices.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace zeroth {
namespace {

struct Draws {
  std::uint64_t state;
  std::int64_t below(std::int64_t bound) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int64_t>(state >> 33U) % bound;
  }
};

ExpertCounts drawn_counts(Draws& draws, std::size_t ranks, std::size_t experts) {
  ExpertCounts counts(ranks, std::vector<std::int64_t>(experts, 0));
  for (auto& of_rank : counts)
    for (std::int64_t& count : of_rank) count = draws.below(3) == 0 ? draws.below(100) : draws.below(4);
  return counts;
}

std::int64_t greatest(const std::vector<std::int64_t>& rows) {
  return *std::ranges::max_element(rows);
}

TEST(ExpertPlacement, CopiesKeepTheirBounds) {
  Draws draws{1};
  for (int turn = 0; turn < 200; ++turn) {
    const auto ranks = static_cast<std::size_t>(1 + draws.below(5));
    const std::size_t experts = ranks + static_cast<std::size_t>(draws.below(8));
    const ExpertCounts counts = drawn_counts(draws, ranks, experts);
    const std::vector<std::int64_t> sizes = slice_sizes(static_cast<std::int64_t>(experts), static_cast<int>(ranks));
    std::int64_t all = 0;
    for (const auto& of_rank : counts) all = std::accumulate(of_rank.begin(), of_rank.end(), all);
    const std::int64_t without = greatest(rows_of_ranks(counts, std::vector<std::vector<std::int64_t>>(ranks)));
    EXPECT_EQ(place_copies(counts, MeetAt::kExperts, 9), std::vector<std::vector<std::int64_t>>(ranks));
    for (const std::int64_t most : {0, 1, 2, 99}) {
      for (const MeetAt meet : {MeetAt::kTokens, MeetAt::kBalance}) {
        const auto copies = place_copies(counts, meet, most);
        EXPECT_EQ(copies, place_copies(counts, meet, most)) << "all ranks come to the same";
        std::int64_t first = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          EXPECT_LE(static_cast<std::int64_t>(copies[rank].size()), most);
          EXPECT_TRUE(std::ranges::is_sorted(copies[rank]));
          for (const std::int64_t expert : copies[rank]) {
            EXPECT_GT(counts[rank][static_cast<std::size_t>(expert)], 0) << "a copy without rows";
            EXPECT_TRUE(expert < first || expert >= first + sizes[rank]) << "a copy of an own expert";
          }
          first += sizes[rank];
        }
        const std::vector<std::int64_t> rows = rows_of_ranks(counts, copies);
        EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), std::int64_t{0}), all) << "rows are lost";
        if (meet == MeetAt::kTokens && most == 99) {
          for (std::size_t rank = 0; rank < ranks; ++rank)
            EXPECT_EQ(rows[rank], std::accumulate(counts[rank].begin(), counts[rank].end(), std::int64_t{0}));
        }
        if (meet != MeetAt::kBalance) continue;
        EXPECT_LE(greatest(rows), without) << "with " << most << " copies";
      }
    }
  }
}

TEST(ExpertPlacement, WhatAllRowsChooseIsSpread) {
  for (const std::size_t ranks : {2U, 4U, 8U}) {
    ExpertCounts counts(ranks, std::vector<std::int64_t>(2 * ranks, 0));
    for (auto& of_rank : counts) of_rank[0] = 100;
    const auto copies = place_copies(counts, MeetAt::kBalance, 1);
    EXPECT_EQ(greatest(rows_of_ranks(counts, copies)), 100) << "each rank computes its own rows";
  }
  // The heavier rows first, where there is room for one.
  EXPECT_EQ(place_copies({{0, 0, 5, 9}, {0, 0, 0, 0}}, MeetAt::kTokens, 1)[0], std::vector<std::int64_t>{3});
}

TEST(ExpertPlacement, BadCountsAreRefused) {
  for (const ExpertCounts& wrong : {ExpertCounts{}, ExpertCounts{{1}, {1}}, ExpertCounts{{1, 2}, {1}}})
    (void)test::error_of(ErrorCode::kUsage, [&] { (void)place_copies(wrong, MeetAt::kTokens, 1); });
  (void)test::error_of(ErrorCode::kUsage, [&] { (void)place_copies({{1, 2}}, MeetAt::kTokens, -1); });
}

}  // namespace
}  // namespace zeroth
