// Rows on their way between ranks: started, and taken later, with a gradient that is started and taken the same way.
//
//   auto moving = start_rows(x, traffic, ranks);   // messages go
//   ...                                            // computation, other moves
//   at::Tensor rows = take_rows_of(moving);        // waits
//
// Moves are taken in the order in which they were started, on all ranks. Backward starts a move where forward took one,
// and takes it where forward started it: autograd runs nodes in the reverse order of forward, so the backward of
// computation runs between them.
#pragma once

#include <zeroth/libtorch/expert_ranks.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

/// Rows for each rank of a group and from each; they lie in rank order.
struct RowTraffic {
  std::vector<std::int64_t> given{};
  std::vector<std::int64_t> taken{};
  /// [from][to], of all ranks; needed for two hops only.
  std::vector<std::vector<std::int64_t>> of_pairs{};
  [[nodiscard]] RowTraffic reversed() const;
};

struct RowFlight;

struct MovingRows {
  at::Tensor rows{};  ///< a tensor without elements, which carries the gradient
  std::shared_ptr<RowFlight> flight{};
};

/// x: [rows given, ...], of any device. With two hops it blocks for the first one. Throws as collectives do.
[[nodiscard]] MovingRows start_rows(const at::Tensor& x, RowTraffic traffic, const ExpertRanks& ranks);
/// [rows taken, ...]: of rank 0, of rank 1, ... Blocks. Once for each move.
[[nodiscard]] at::Tensor take_rows_of(const MovingRows& moving);

}  // namespace zeroth::libtorch
