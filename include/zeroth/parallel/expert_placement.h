// Which ranks hold a copy of an expert during a layer, besides the rank that owns it.
//
// P ranks share E experts: rank r owns slice r of slice_sizes(E, P). counts[r][e]: rows of rank r for expert e. A row
// of rank r for expert e is computed by rank r if it has a copy of e, else by the owner of e. So a copy of e on rank r
// keeps counts[r][e] rows at home, and costs the elements of one expert each way.
//
// Ref: Nie et al., "Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data Parallelism", 2025
// (sparse materialization under a budget of memory).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace zeroth {

/// Where rows and experts meet.
enum class MeetAt : std::uint8_t {
  kExperts,  ///< rows travel to the owners: expert parallelism. No copies
  kTokens,   ///< each rank gets copies of the experts that its rows chose, those with most rows first
  kBalance,  ///< copies where they lower the greatest number of rows that a rank computes
};

/// "experts", "tokens", "balance".
[[nodiscard]] std::string_view name_of(MeetAt meet);
/// The reverse. Throws kUsage for another name.
[[nodiscard]] MeetAt meet_at_of(std::string_view name);

/// Of each expert the rank that owns it.
[[nodiscard]] std::vector<std::size_t> owners_of_experts(std::size_t experts, std::size_t ranks);

using ExpertCounts = std::vector<std::vector<std::int64_t>>;

/// For each rank the experts of which it holds a copy, ascending; at most `most` of them. The same on all ranks for the
/// same counts. Throws kUsage for counts that are no [ranks][E], fewer experts than ranks, or `most` below 0.
///
/// kBalance moves rows off the rank with most of them, one copy at a time: the copy after which the greater of the two
/// ranks' numbers is least; of equal ones the lower rank, then the lower expert. It ends when no copy lowers that
/// rank's number. So the result is no optimum: a copy may only serve the rows of its own rank.
[[nodiscard]] std::vector<std::vector<std::int64_t>> place_copies(const ExpertCounts& counts, MeetAt meet,
                                                                  std::int64_t most);

/// Rows that each rank computes with these copies.
[[nodiscard]] std::vector<std::int64_t> rows_of_ranks(const ExpertCounts& counts,
                                                      const std::vector<std::vector<std::int64_t>>& copies);

}  // namespace zeroth
