// MatchedSums: sums that this rank has of its sub-group, joined with those of the others by collectives at the end
// of a step.
#pragma once

#include "zero/coded_calls.h"
#include "zero/gradient_exchange.h"
#include "zero/sub_group.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace zeroth {

/// GradientExchange::sync() as a call of all ranks.
void matched_sync(OperationId what, std::string_view name, CommBackend& backend, const Stream& stream);

class MatchedSums {
 public:
  /// `context` as for an exchange; blocks: groups are made.
  explicit MatchedSums(const ExchangeContext& context);

  /// Whether sub-groups have to be joined.
  [[nodiscard]] bool combines() const { return others_.moves(); }
  /// `summed`: one a flat, 1 if this rank's sub-group has sums of it in this step, at ModelMemory::micro_step_sums();
  /// afterwards, if any sub-group has. Blocks until this rank's shards hold the sums of all sub-groups.
  void combine(std::span<std::uint8_t> summed);
  /// Sums of `summed` flats to the ranks that update with them, see GradientExchange::share_sums(). Blocks.
  void share(std::span<const std::uint8_t> summed);
  [[nodiscard]] std::size_t transport_bytes() const {
    return others_.transport_bytes() + updates_.transport_bytes() + (codes_ ? codes_->transport_bytes() : 0);
  }

 private:
  const ModelLayout& model_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Stream reduce_stream_;
  ReducedShards& shards_;
  Kernels& kernels_;
  SubGroupCalls others_;                   ///< one rank of each sub-group, with the same part
  SubGroupPath updates_;                   ///< whose pieces are what this rank updates
  std::unique_ptr<CodedReduction> codes_;  ///< null: what sub-groups exchange travels as it is
};

}  // namespace zeroth
