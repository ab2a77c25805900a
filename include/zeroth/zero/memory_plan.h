// MemoryPlan and WirePlan: what a plan will use, before anything is allocated or moved. Pure functions of the layout.
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {

/// Bytes by state on one rank. With P elements of one dtype of p bytes (padding counted), a = accumulation bytes, b =
/// bytes of bucket_dtypes(), N ranks, k optimizer states, w and o the degrees of parameters and optimizer (1 where they
/// are replicated), and g the gradients' (N by default):
///   parameters  pP/w      masters  (a-p)P/o      optimizer  kaP/o
///   buckets     bP, or ring and single units' slots if gradients are Flat
///   reduced     aP/min(g, o), or aP/g if gradients are Replicate, of the flats not in sums_in_buckets()
///   gathered    0, or ring and single units' slots if parameters are Flat             control    signals
[[nodiscard]] MemorySnapshot plan_memory(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                         int optimizer_states, int micro_steps);

/// Bytes that one rank receives from others in a step, by purpose.
struct WireBytes {
  std::uint64_t gather_parameters = 0;  ///< forward and backward gathers
  std::uint64_t reduce_gradients = 0;
  std::uint64_t gather_gradients = 0;  ///< sums, where several ranks make the same update (stage 0, HSDP)
  std::uint64_t publish_parameters =
      0;  ///< updated shards, where the optimizer's are smaller than the parameters' (stages 1, 2, hpZ)

  [[nodiscard]] std::uint64_t total() const {
    return gather_parameters + reduce_gradients + gather_gradients + publish_parameters;
  }
  bool operator==(const WireBytes&) const = default;
};

/// Formula for a step in which every unit runs once forward and once backward in each of `micro_steps`:
/// sum over flats of gathers x parameter bytes x (the whole but the own part) + reductions x gradient bytes x (own part
/// at g) x (g - 1)
/// + bytes of a sum x (own piece) x (N/g - 1) + bytes of a sum x (part of the update but own piece) + parameter bytes x
/// (part at rest but part of the update). g is the gradients' degree, N by default. A unit that stays gathered from
/// forward to backward (see Reshard) counts one gather a micro-step, the others two.
[[nodiscard]] WireBytes plan_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps);

/// Where the nodes of a world are, and whether what crosses between them does so once (two_level.h).
struct NodeLevels {
  std::vector<int> node_sizes{};  ///< CommBackend's
  bool two_levels = false;
  bool one_sided =
      false;  ///< parts come from the ranks that have them at rest; else over the degrees between (Degrees::path())
};

/// Of plan_wire(), what comes from ranks on other nodes. With two levels a reduction brings one sum from each other
/// node, in the flat's accumulation dtype, and a gather among several ranks of each node the parts of this rank's
/// counterparts.
[[nodiscard]] WireBytes plan_far_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                                      const NodeLevels& nodes);

/// Whether a unit keeps its gathered parameters from forward to backward under this plan.
[[nodiscard]] bool keeps_gathered(const ModelLayout& model, const ShardingPlan& plan, int unit);

/// Dtype of the gradients in each flat's bucket, one a flat. That of a 16-bit flat is its own where others read the
/// bucket, nothing is added in it and nothing is gathered into it: half the memory and half the traffic, and the same
/// sums, because widening changes no value. Only in repeated units, and not with tied parameters: elsewhere a parameter
/// may well be used twice (an embedding that is the head, too), and then its gradient is a sum in the accumulation
/// dtype already. And matrices only: torch gives the weight of an RMSNorm a float32 gradient.
[[nodiscard]] std::vector<DType> bucket_dtypes(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Flats whose sums take the place of this rank's own gradients in their bucket instead of memory of their own; one
/// entry a flat. Only where buckets hold the accumulation dtype and are reduced once a step: then all units that have a
/// bucket of their own, and of those that share a slot the one whose bucket is the last there in a backward, the first
/// in the model. Every unit has its own where all local gradients are held anyway, and where a ring of buckets and
/// shards beside it would be no less, all ranks together.
[[nodiscard]] std::vector<bool> sums_in_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Where memory of its own for a flat's sums lies in the flat, on a rank: what it sums in its sub-group and what it
/// updates, of which one contains the other. Where the others' sums come into the buckets it is the first alone.
[[nodiscard]] Range sums_range(const ModelLayout& model, const ShardingPlan& plan, int flat, int rank);

/// Slots of gathered parameters / of gradient buckets under this plan. In the ring, gathered parameters have a slot for
/// the unit that computes and one for each unit that is gathered ahead, at most ring_slots; what needs more at once
/// gets overflow memory.
[[nodiscard]] SlotTable gathered_slots(const ModelLayout& model, const ShardingPlan& plan);
[[nodiscard]] SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Slots beyond the plan, in the same rings: for gradients in the accumulation dtype of flats whose bucket is narrower.
[[nodiscard]] SlotTable wide_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Bytes of the signals that one rank writes for the others to read.
[[nodiscard]] std::size_t control_bytes(const ModelLayout& model);

}  // namespace zeroth
