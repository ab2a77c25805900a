#include "libtorch/experts/exchange_plan.h"

#include <zeroth/parallel/slices.h>

#include <algorithm>
#include <numeric>
#include <tuple>

namespace zeroth::libtorch {
namespace {

/// Of each expert the piece of its owner.
std::vector<std::size_t> pieces_of_experts(std::size_t experts, std::size_t ranks, int pieces, std::size_t first) {
  std::vector<std::size_t> result;
  for (const std::int64_t own : slice_sizes(static_cast<std::int64_t>(experts), static_cast<int>(ranks))) {
    std::size_t piece = first;
    for (const std::int64_t count : slice_sizes(own, pieces))
      result.insert(result.end(), static_cast<std::size_t>(count), piece++);
  }
  return result;
}

}  // namespace

ExchangePlan plan_exchange(const ExpertCounts& counts, std::size_t own, MeetAt meet, std::int64_t copies, int pieces) {
  const std::size_t ranks = counts.size();
  const std::size_t experts = counts.front().size();
  const std::size_t of_copies = meet == MeetAt::kExperts ? 0 : 1;  // pieces
  const std::vector<std::size_t> owners = owners_of_experts(experts, ranks);
  const std::vector<std::size_t> piece_of = pieces_of_experts(experts, ranks, pieces, of_copies);
  ExchangePlan plan;
  plan.copies.resize(ranks);
  if (meet != MeetAt::kExperts && ranks > 1) plan.copies = place_copies(counts, meet, copies);
  plan.pieces.resize(static_cast<std::size_t>(pieces) + of_copies);
  plan.here = plan.copies[own];
  if (of_copies > 0) plan.pieces[0].count = static_cast<std::int64_t>(plan.here.size());
  for (std::size_t expert = 0; expert < experts; ++expert) {
    if (owners[expert] != own) continue;
    plan.here.push_back(static_cast<std::int64_t>(expert));
    ++plan.pieces[piece_of[expert]].count;
  }
  std::int64_t first = 0;
  for (PiecePlan& piece : plan.pieces) {
    piece.first = first;
    first += piece.count;
    piece.given.assign(ranks, 0);
    piece.taken.assign(ranks, 0);
    piece.of_pairs.assign(ranks, std::vector<std::int64_t>(ranks, 0));
    piece.rows.assign(static_cast<std::size_t>(piece.count), 0);
    piece.arrivals.assign(ranks, piece.rows);
  }
  std::vector<std::int64_t> place(experts, 0);  // of experts here
  for (std::size_t at = 0; at < plan.here.size(); ++at)
    place[static_cast<std::size_t>(plan.here[at])] = static_cast<std::int64_t>(at);

  std::vector<std::tuple<std::size_t, std::size_t, std::int64_t>> ways;  // of this rank's rows
  for (std::size_t from = 0; from < ranks; ++from) {
    for (std::size_t expert = 0; expert < experts; ++expert) {
      const auto number = static_cast<std::int64_t>(expert);
      const bool has_copy = std::ranges::binary_search(plan.copies[from], number);
      const std::size_t to = has_copy ? from : owners[expert];
      const std::size_t in = has_copy ? 0 : piece_of[expert];
      const std::int64_t rows = counts[from][expert];
      PiecePlan& piece = plan.pieces[in];
      piece.of_pairs[from][to] += rows;
      if (from == own) {
        piece.given[to] += rows;
        ways.emplace_back(in, to, number);
      }
      if (to != own) continue;
      const auto at = static_cast<std::size_t>(place[expert] - piece.first);
      piece.taken[from] += rows;
      piece.rows[at] += rows;
      piece.arrivals[from][at] += rows;
    }
  }
  std::ranges::sort(ways);
  for (const auto& way : ways) plan.order.push_back(std::get<2>(way));
  return plan;
}

std::vector<std::int64_t> rows_by_expert(const PiecePlan& piece) {
  std::vector<std::int64_t> next(piece.rows.size());
  std::exclusive_scan(piece.rows.begin(), piece.rows.end(), next.begin(), std::int64_t{0});
  std::vector<std::int64_t> source(
      static_cast<std::size_t>(std::accumulate(piece.rows.begin(), piece.rows.end(), std::int64_t{0})));
  std::int64_t row = 0;  // as they come
  for (const auto& of_rank : piece.arrivals)
    for (std::size_t expert = 0; expert < of_rank.size(); ++expert)
      for (std::int64_t left = of_rank[expert]; left > 0; --left)
        source[static_cast<std::size_t>(next[expert]++)] = row++;
  return source;
}

}  // namespace zeroth::libtorch
