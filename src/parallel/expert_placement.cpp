#include <zeroth/base/error.h>
#include <zeroth/parallel/expert_placement.h>
#include <zeroth/parallel/slices.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>

namespace zeroth {
namespace {

using Copies = std::vector<std::vector<std::int64_t>>;

constexpr std::array<std::string_view, 3> kMeets{"experts", "tokens", "balance"};

void require_counts(const ExpertCounts& counts, std::int64_t most) {
  const std::size_t ranks = counts.size();
  const std::size_t experts = ranks == 0 ? 0 : counts.front().size();
  const bool even = std::ranges::all_of(counts, [&](const auto& of_rank) { return of_rank.size() == experts; });
  if (ranks == 0 || !even || experts < ranks)
    throw Error(ErrorCode::kUsage, "these are not the rows of ranks for their experts",
                {.where = "parallel.expert_placement",
                 .which = "counts",
                 .expected = "a rank or more, and for each as many numbers, one an expert, as many as ranks or more",
                 .got = std::to_string(ranks) + " ranks, " + std::to_string(experts) + " numbers of the first"});
  if (most < 0)
    throw Error(
        ErrorCode::kUsage, "a rank has less than no copy",
        {.where = "parallel.expert_placement", .which = "most", .expected = "0 or more", .got = std::to_string(most)});
}

bool has(const std::vector<std::int64_t>& copies, std::size_t expert) {
  return std::ranges::find(copies, static_cast<std::int64_t>(expert)) != copies.end();
}

void copy_chosen(const ExpertCounts& counts, const std::vector<std::size_t>& owners, std::size_t most, Copies& copies) {
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    for (std::size_t expert = 0; expert < owners.size(); ++expert)
      if (owners[expert] != rank && counts[rank][expert] > 0) copies[rank].push_back(static_cast<std::int64_t>(expert));
    std::ranges::stable_sort(copies[rank], std::ranges::greater(),
                             [&](std::int64_t expert) { return counts[rank][static_cast<std::size_t>(expert)]; });
    copies[rank].resize(std::min(copies[rank].size(), most));
  }
}

void copy_for_balance(const ExpertCounts& counts, const std::vector<std::size_t>& owners, std::size_t most,
                      Copies& copies) {
  std::vector<std::int64_t> rows = rows_of_ranks(counts, copies);
  struct Copy {
    std::int64_t greater;  // of the rows of both ranks afterwards
    std::size_t rank, expert;
  };
  while (true) {
    const auto loaded = static_cast<std::size_t>(std::ranges::max_element(rows) - rows.begin());
    std::optional<Copy> best;
    for (std::size_t rank = 0; rank < counts.size(); ++rank) {
      if (rank == loaded || copies[rank].size() >= most) continue;
      for (std::size_t expert = 0; expert < owners.size(); ++expert) {
        const std::int64_t moved = counts[rank][expert];
        if (owners[expert] != loaded || moved == 0 || has(copies[rank], expert)) continue;
        const std::int64_t greater = std::max(rows[loaded] - moved, rows[rank] + moved);
        if (greater < (best ? best->greater : rows[loaded])) best = {greater, rank, expert};
      }
    }
    if (!best) return;
    copies[best->rank].push_back(static_cast<std::int64_t>(best->expert));
    rows[loaded] -= counts[best->rank][best->expert];
    rows[best->rank] += counts[best->rank][best->expert];
  }
}

}  // namespace

std::string_view name_of(MeetAt meet) {
  return kMeets[static_cast<std::size_t>(meet)];
}

MeetAt meet_at_of(std::string_view name) {
  const auto found = std::ranges::find(kMeets, name);
  if (found == kMeets.end())
    throw Error(ErrorCode::kUsage, "there is no such way",
                {.where = "parallel.expert_placement",
                 .which = "meet",
                 .expected = "experts, tokens, balance",
                 .got = "\"" + std::string(name) + "\""});
  return static_cast<MeetAt>(found - kMeets.begin());
}

std::vector<std::size_t> owners_of_experts(std::size_t experts, std::size_t ranks) {
  std::vector<std::size_t> owners;
  const auto sizes = slice_sizes(static_cast<std::int64_t>(experts), static_cast<int>(ranks));
  for (std::size_t rank = 0; rank < sizes.size(); ++rank)
    owners.insert(owners.end(), static_cast<std::size_t>(sizes[rank]), rank);
  return owners;
}

Copies place_copies(const ExpertCounts& counts, MeetAt meet, std::int64_t most) {
  require_counts(counts, most);
  Copies copies(counts.size());
  const std::vector<std::size_t> owners = owners_of_experts(counts.front().size(), counts.size());
  if (meet == MeetAt::kTokens) copy_chosen(counts, owners, static_cast<std::size_t>(most), copies);
  if (meet == MeetAt::kBalance) copy_for_balance(counts, owners, static_cast<std::size_t>(most), copies);
  for (auto& of_rank : copies) std::ranges::sort(of_rank);
  return copies;
}

std::vector<std::int64_t> rows_of_ranks(const ExpertCounts& counts, const Copies& copies) {
  const std::vector<std::size_t> owners = owners_of_experts(counts.front().size(), counts.size());
  std::vector<std::int64_t> rows(counts.size(), 0);
  for (std::size_t rank = 0; rank < counts.size(); ++rank)
    for (std::size_t expert = 0; expert < owners.size(); ++expert)
      rows[has(copies[rank], expert) ? rank : owners[expert]] += counts[rank][expert];
  return rows;
}

}  // namespace zeroth
