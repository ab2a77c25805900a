// ReducedShards: this rank's shards of the reduced gradients, and the sums that go into them.
#pragma once

#include <span>
#include <vector>

#include <kernels/norm/norm.h>
#include <zeroth/zero/kernel_context.h>
#include <zeroth/zero/model_memory.h>

namespace zeroth {

class ReducedShards {
 public:
  ReducedShards(const ModelLayout& model, ModelMemory& memory, KernelContext kernels);

  /// One reduction event: the sum of `sources` (this rank's range of the flat from each rank that took part, in rank order,
  /// accumulation dtype) is added to what earlier events of the step left, or stored if it is the first.
  void add(int flat, std::span<const void* const> sources);
  /// The next event of each flat stores.
  void begin_step();

  /// Whether the shard holds sums of this step.
  [[nodiscard]] bool has_sums(int flat) const { return has_sums_[static_cast<std::size_t>(flat)]; }
  /// Sum of squares of the shard, each times the flat's grad_factor.
  [[nodiscard]] const kernels::NormAccumulator& norm(int flat) const { return norms_[static_cast<std::size_t>(flat)]; }

 private:
  const ModelLayout& model_;
  ModelMemory& memory_;
  KernelContext kernels_;
  std::vector<bool> has_sums_;
  std::vector<kernels::NormAccumulator> norms_;  ///< one a flat, of its last event
};

}  // namespace zeroth
