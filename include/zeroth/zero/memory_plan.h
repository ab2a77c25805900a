// MemoryPlan and WirePlan: what a plan will use, before anything is allocated or moved. Pure functions of the layout.
#pragma once

#include <cstdint>
#include <string>

#include <zeroth/device/memory.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

namespace zeroth {

/// Bytes by state on one rank. With P elements of one dtype of p bytes (padding counted), a = accumulation bytes, N ranks, k optimizer
/// states:
///   parameters  pP (Replicate) or pP/N      masters  4P or 4P/N if p = 2, else 0      optimizer  kaP or kaP/N
///   buckets     aP, or ring and single units' slots if gradients are Flat             reduced    aP/N, or 0: sums_in_buckets()
///   gathered    0, or ring and single units' slots if parameters are Flat             control    signals
[[nodiscard]] MemorySnapshot plan_memory(const ModelLayout& model,
                                         const ShardingPlan& plan,
                                         int rank,
                                         int optimizer_states,
                                         int micro_steps);

/// Bytes that one rank receives from others in a step, by purpose.
struct WireBytes {
  std::uint64_t gather_parameters = 0;  ///< forward and backward gathers
  std::uint64_t reduce_gradients = 0;
  std::uint64_t gather_gradients = 0;   ///< replicated gradients (stage 0)
  std::uint64_t publish_parameters = 0;  ///< updated shards (stages 1, 2)

  [[nodiscard]] std::uint64_t total() const {
    return gather_parameters + reduce_gradients + gather_gradients + publish_parameters;
  }
  bool operator==(const WireBytes&) const = default;
};

/// Formula for a step in which every unit runs once forward and once backward in each of `micro_steps`:
/// sum over flats of (gathers x parameter bytes + reductions x gradient bytes) x (everything but the own shard).
/// A unit that stays gathered from forward to backward (see Reshard) counts one gather a micro-step, the others two.
[[nodiscard]] WireBytes plan_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps);

/// Whether a unit keeps its gathered parameters from forward to backward under this plan.
[[nodiscard]] bool keeps_gathered(const ModelLayout& model, const ShardingPlan& plan, int unit);

/// Every unit has a bucket of its own that is reduced once a step, and the sums of this rank's shard take their place in it instead of
/// memory of their own. So it is where all local gradients are held anyway, and where a ring of buckets and shards beside it would be
/// no less, all ranks together.
[[nodiscard]] bool sums_in_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Slots of gathered parameters / of gradient buckets under this plan.
[[nodiscard]] SlotTable gathered_slots(const ModelLayout& model, const ShardingPlan& plan);
[[nodiscard]] SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Bytes of the signals that one rank writes for the others to read.
[[nodiscard]] std::size_t control_bytes(const ModelLayout& model);

}  // namespace zeroth
