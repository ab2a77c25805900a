// Which rows go where, and in which order: the plan of a TokenExchange, from counts alone. Without torch.
#pragma once

#include <zeroth/parallel/expert_placement.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

/// Rows of one piece: how many to and from each rank.
struct PiecePlan {
  std::vector<std::int64_t> given{};
  std::vector<std::int64_t> taken{};
  std::vector<std::vector<std::int64_t>> of_pairs{};  ///< [from][to]
  std::int64_t first = 0;                             ///< of the experts here
  std::int64_t count = 0;
  std::vector<std::int64_t> rows{};                   ///< of each of its experts
  std::vector<std::vector<std::int64_t>> arrivals{};  ///< [from][its experts]
};

struct ExchangePlan {
  std::vector<std::vector<std::int64_t>> copies{};  ///< of each rank, ascending
  std::vector<std::int64_t> here{};                 ///< own copies, then own experts
  std::vector<std::int64_t> order{};  ///< all experts, as rows for them are sent: piece, rank, place there
  std::vector<PiecePlan> pieces{};    ///< that of the copies first, where there may be any
};

/// counts: [ranks][E]. What other ranks have for experts of others may be 0 where there are no copies and of_pairs is
/// not used. pieces: from 1, of own experts; at most as many as the rank with fewest has.
[[nodiscard]] ExchangePlan plan_exchange(const ExpertCounts& counts, std::size_t own, MeetAt meet, std::int64_t copies,
                                         int pieces);

/// Of rows that come as [from][expert]: source[place in the order of experts] = row. rows: of each expert.
[[nodiscard]] std::vector<std::int64_t> rows_by_expert(const PiecePlan& piece);

}  // namespace zeroth::libtorch
