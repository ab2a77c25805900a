// MatchedSums: sums that this rank has of its run of ranks, joined with those of the others by matched calls at the end
// of a step.
#pragma once

#include "zero/gradient_exchange.h"
#include "zero/row_group.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace zeroth {

/// GradientExchange::sync() as a call of all ranks.
void matched_sync(SyncPoint what, std::string_view name, CommBackend& backend, const Stream& stream);

class MatchedSums {
 public:
  /// `context` as for an exchange; blocks: groups are made.
  explicit MatchedSums(const ExchangeContext& context);

  /// Whether runs have to be joined.
  [[nodiscard]] bool combines() const { return others_.moves(); }
  /// `summed`: one a flat, 1 if this rank's run has sums of it in this step, at ModelMemory::micro_step_sums();
  /// afterwards, if any run has. Blocks until this rank's shards hold the sums of all runs.
  void combine(std::span<std::uint8_t> summed);
  /// Sums of `summed` flats to the ranks that update with them, see GradientExchange::share_sums(). Blocks.
  void share(std::span<const std::uint8_t> summed);
  [[nodiscard]] std::size_t transport_bytes() const { return others_.transport_bytes() + updates_.transport_bytes(); }

 private:
  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  ReducedShards& shards_;
  RowGroup others_;  ///< one rank of each run, with the same part
  RowPath updates_;  ///< whose pieces are what this rank updates
};

}  // namespace zeroth
