// The memory and the received bytes of a plan, computed before any allocation or call. Pure functions of the layout.
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>
#include <zeroth/zero/state_table.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Bytes by state on one rank. With P elements of one dtype of p bytes (padding counted), a = accumulation bytes, b =
/// bytes of bucket_dtypes(), N ranks, k optimizer states, w and o the degrees of parameters and optimizer (1 where they
/// are replicated), and g the gradients' (N by default):
///   parameters  pP/w      masters  (a-p)P/o      optimizer  kaP/o
///   buckets     bP, or ring and single units' slots if gradients are Flat, or their sums leave the device
///   reduced     aP/min(g, o), or aP/g if gradients are Replicate, of the flats not in sums_in_buckets()
///   gathered    0, or ring and single units' slots if parameters are Flat             control    signals
///   staging    slots of blocks in files: block_slots() of each set; messages of WireCodes, those of one flat
/// The first four lines are sums over state_table(), whose rows are whole 64 bytes; of states in files those blocks
/// count that rest in memory. Parameters in files count as staging, and as gathered at every stage.
[[nodiscard]] MemorySnapshot plan_memory(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                         std::span<const StateDeclaration> states, int micro_steps);
/// The same for element_states(`optimizer_states`).
[[nodiscard]] MemorySnapshot plan_memory(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                         int optimizer_states, int micro_steps);

/// Bytes on disk of the states of one rank that rest in files: their blocks, rounded up to whole stripes.
[[nodiscard]] std::uint64_t plan_file_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                            std::span<const StateDeclaration> states, int micro_steps,
                                            std::size_t stripe_bytes);

/// Bytes that one rank receives from other ranks in a step, by purpose.
struct WireBytes {
  std::uint64_t gather_parameters = 0;  ///< forward and backward gathers
  std::uint64_t reduce_gradients = 0;
  std::uint64_t gather_gradients = 0;  ///< sums, if several ranks make the same update (stage 0, HSDP)
  std::uint64_t publish_parameters =
      0;  ///< updated shards, if they are smaller than the parameters at rest (stages 1, 2, hpZ)

  [[nodiscard]] std::uint64_t total() const {
    return gather_parameters + reduce_gradients + gather_gradients + publish_parameters;
  }
  WireBytes& operator+=(const WireBytes& other) {
    gather_parameters += other.gather_parameters;
    reduce_gradients += other.reduce_gradients;
    gather_gradients += other.gather_gradients;
    publish_parameters += other.publish_parameters;
    return *this;
  }
  bool operator==(const WireBytes&) const = default;
};

/// Received bytes of a step in which every unit runs once forward and once backward in each of `micro_steps`. Sum over
/// the flats, in elements times bytes per element:
///   gather_parameters   gathers x p x (length - part at rest)
///   reduce_gradients    reductions x b x (part at g) x (g - 1) + a x (own piece) x (N/g - 1)
///   gather_gradients    a x (part of the sums - own piece)
///   publish_parameters  p x (part at rest - part of the update)
/// What travels in codes (WireCodes) counts its codes and scales; with nodes, one such gather in a step, and the others
/// among the ranks of a node.
/// g is the gradients' degree, N by default. A unit that stays gathered from forward to backward (see Reshard) counts
/// one gather per micro-step, the others two, for each of UnitSpec::uses; one with Reshard::kStep one in a step.
/// `gathers`: of each unit in a step, where the front end knows them; empty: these.
[[nodiscard]] WireBytes plan_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                                  std::span<const int> gathers = {});

/// The nodes of a world, and whether calls go over two levels (two_level.h).
struct NodeLevels {
  std::vector<int> node_sizes{};  ///< CommBackend's
  bool two_levels = false;
  bool one_sided = false;  ///< parts come directly from the ranks with them; else along Degrees::path()
};

/// The part of plan_wire() that comes from ranks on other nodes. With two levels, a reduction receives one sum from
/// each other node, in the flat's accumulation dtype. A gather among several ranks of each node receives the parts of
/// this rank's counterparts.
[[nodiscard]] WireBytes plan_far_wire(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                                      const NodeLevels& nodes);

/// True if a unit stays gathered from forward to backward under this plan.
[[nodiscard]] bool keeps_gathered(const ModelLayout& model, const ShardingPlan& plan, int unit);

/// How often a step gathers the unit; arguments as plan_wire().
[[nodiscard]] std::uint64_t planned_gathers(const ModelLayout& model, const ShardingPlan& plan, int unit,
                                            int micro_steps, std::span<const int> gathers = {});

/// Dtype of the gradients in each flat's bucket, one entry per flat. It is the accumulation dtype, or the flat's own
/// 16-bit dtype if other ranks read the bucket and no value is added or gathered in it. A 16-bit bucket has half the
/// memory and half the traffic. The sums are the same, because widening changes no value.
/// 16-bit buckets are for matrices of repeated units without tied parameters. In other units a parameter may be used
/// twice (an embedding that is the head, too), and its gradient is then a sum in the accumulation dtype. Vectors are
/// excluded because torch gives the weight of an RMSNorm a float32 gradient. Sums that leave the device are formed in
/// the bucket, in its dtype: that of accumulation.
[[nodiscard]] std::vector<DType> bucket_dtypes(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Flats whose sums are stored in place of this rank's own gradients in their bucket, without memory of their own; one
/// entry per flat. This needs buckets in the accumulation dtype that are reduced once a step. Then it holds for all
/// units with their own bucket, and among units that share a slot for the first one in the model, whose bucket is the
/// last in a backward. Every unit has its own bucket if all local gradients are held anyway, or if a ring of buckets
/// with shards beside it would need no less memory over all ranks. Sums that leave the device lie in no bucket.
[[nodiscard]] std::vector<bool> sums_in_buckets(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// The range of the flat that a rank's separate memory for sums covers: the larger of the part that it sums in its run
/// of ranks and the part that it updates (one contains the other). If gradients are gathered into the buckets: the part
/// that it sums.
[[nodiscard]] Range sums_range(const ModelLayout& model, const ShardingPlan& plan, int flat, int rank);

/// Slots of gathered parameters, and of gradient buckets, under this plan. The ring of gathered parameters has one slot
/// for the unit that computes and one for each unit that is gathered ahead, at most ring_slots. Further units that are
/// gathered at the same time get overflow memory.
[[nodiscard]] SlotTable gathered_slots(const ModelLayout& model, const ShardingPlan& plan);
[[nodiscard]] SlotTable bucket_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Slots beyond the plan, in the same rings, for accumulation-dtype gradients of flats with a 16-bit bucket.
[[nodiscard]] SlotTable wide_slots(const ModelLayout& model, const ShardingPlan& plan, int micro_steps);

/// Bytes of one rank's signals, which the other ranks read.
[[nodiscard]] std::size_t control_bytes(const ModelLayout& model);

}  // namespace zeroth
