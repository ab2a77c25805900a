// FreezeWatch: freezes the variances of an optimizer once they have settled.
//
// After each 1 / (1 - beta2) updates (the greatest beta2 of the parameter groups) the ranks sum up all variances,
// without the bias of their first steps. They have settled when the smaller of two such sums, one after the other, is
// at least `threshold` of the greater one, and the learning rate has had its warmup in between. This is the heuristic
// of 1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888), in both directions.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace zeroth {

/// What a checkpoint keeps of it.
struct FreezeState {
  std::int64_t step = 0;             ///< Freezing::step
  bool has_settled = false;          ///< it was found, and not given
  std::optional<double> last_sum{};  ///< of the last look
};

class FreezeWatch {
 public:
  /// Borrows the optimizer, which has Freezing. `warmup`: updates before the learning rate is what it is to be.
  FreezeWatch(Optimizer& optimizer, std::span<const GroupHyper> groups, std::int64_t warmup);

  /// Collective over the job where it looks, else nothing; blocks. After the update that has made `committed` of them.
  /// Freezes variances from here on, and says so; "": it does not.
  [[nodiscard]] std::string after_update(std::int64_t committed, const ShardGroups& groups, const Communicator& job,
                                         Kernels& kernels, const Stream& stream);

  [[nodiscard]] FreezeState state() const;
  /// Of a checkpoint, which `fits`.
  void take(const FreezeState& there);
  /// Throws kCheckpoint for variances that have had the updates until the freeze of their training (or until they were
  /// written, after `step` updates), where this training would freeze them elsewhere, or would have done so before.
  void require_fits(const FreezeState& there, std::int64_t step, const std::string& path) const;

 private:
  [[nodiscard]] bool looks() const { return given_.threshold > 0.0; }

  Optimizer& optimizer_;
  Freezing given_;         ///< of the settings
  std::int64_t interval_;  ///< updates between two looks
  double beta2_ = 0.0;
  std::int64_t warmup_;
  bool has_settled_ = false;
  std::optional<double> last_sum_{};
};

}  // namespace zeroth
