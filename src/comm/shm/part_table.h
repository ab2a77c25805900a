// PartTable: who reads what of whose buffer in a scatter or an all_to_all, as one rank sees it.
#pragma once

#include <cstdint>
#include <vector>

namespace zeroth::detail {

/// In elements; one entry a rank, this one included.
struct PartTable {
  std::vector<std::int64_t> given{};  ///< length of this rank's part for each, one after the other in its send buffer
  std::vector<std::int64_t> given_offset{};
  std::vector<std::int64_t> taken{};          ///< length of each rank's part for this one
  std::vector<std::int64_t> source_offset{};  ///< where it lies in that rank's send buffer
  std::vector<std::int64_t> taken_offset{};   ///< and in this rank's recv buffer
  std::int64_t longest = 0;                   ///< part between two different ranks, the same on all ranks
  bool fits_posts = false;                    ///< every rank's data lies beside its description
};

}  // namespace zeroth::detail
