// ShardingPlan: a placement for each state. ZeRO stages 0 to 3 are four values of it, made by zero_plan(). No other
// code reads the stage number.
//
//   stage   parameter   between forward and backward   gradient    optimizer
//   0       Replicate   Replicate                       Replicate   Replicate
//   1       Replicate   Replicate                       Partial     Flat
//   2       Replicate   Replicate                       Flat        Flat
//   3       Flat        Flat (or Replicate: reshard)    Flat        Flat
//
// The degree of a Flat state is the number of ranks that it is split over (shard/degrees.h): all ranks, or runs of
// fewer ranks, so that frequent gathers stay inside a node. Replicate is degree 1. If the optimizer's degree is below
// the number of ranks, sums travel to the ranks that need them. If it is above the parameters' degree, updated
// parameters travel. Neither changes a number: sums are formed over all ranks, piece by piece, under every plan.
//
// The gradients' degree changes numbers. The gradients of a micro-step are summed in runs of that many ranks, and the
// sums of the runs are added once, at the end of the step. All plans with one gradient degree have the same bits. Plans
// with different gradient degrees may differ in the last place, as with the reduction policy.
//
//   plan        parameter   optimizer     for each step and rank, between nodes of k ranks
//   hsdp k      Flat, k     Flat, k       gradients reduced, and sums gathered
//   mics k      the same value
//   hpz k       Flat, k     Flat, all     gradients reduced, and updated parameters gathered
//
// Ref: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhang et
// al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", VLDB 2023; Wang et al., "ZeRO++", 2023.
#pragma once

#include <zeroth/shard/placement.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Time of the reduction while micro-steps accumulate. Part of the numbers: another policy may give other bits.
enum class ReductionPolicy : std::uint8_t {
  kPerMicroStep,  ///< sum over ranks after every backward, accumulate the sums (memory of a shard)
  kPerStep,       ///< accumulate locally, sum over ranks once (memory of all gradients, less traffic)
};

/// The units that give their gathered parameters back after forward.
enum class Reshard : std::uint8_t {
  kDefault,  ///< all but the last repeated unit and those that are not repeated (they stay until backward has used
             ///< them)
  kAll,
  kNone,  ///< everything stays gathered from forward to backward
  kStep,  ///< the front end gathers units once a step and says when it gives them back (Engine::keep_gathered())
};

[[nodiscard]] std::string_view name_of(ReductionPolicy policy) noexcept;
[[nodiscard]] std::string_view name_of(Reshard reshard) noexcept;

/// Number of ranks that each state is split over, in a given world; 1: every rank has all of it.
struct Degrees {
  int parameter = 1;
  int gradient = 1;  ///< of the sums while micro-steps accumulate
  int sums = 1;      ///< of the reduced gradients during the update; before it: the whole world
  int optimizer = 1;
  int node = 1;  ///< of WireCodes; 1: none
  int world = 1;
  /// True if the gradients of a micro-step are summed in runs of ranks, and the sums of the runs once a step.
  [[nodiscard]] bool sums_groups() const { return gradient < world; }
  /// The degrees from `from` down to `to`, both included. Only between neighbours in this list are parts in the order
  /// of their ranks (degrees.h).
  [[nodiscard]] std::vector<int> path(int from, int to) const;
  bool operator==(const Degrees&) const = default;
};

/// Where a state rests between its uses.
enum class Residency : std::uint8_t {
  kDevice,  ///< where it is updated
  kHost,    ///< memory of the host: the same on ranks of a CPU; else in blocks, which the host updates
  kFiles,
};

/// Elements of a block whose states cross a bus: the update of a shorter one is too little work for the threads of the
/// host (docs/offload.md).
inline constexpr std::int64_t kBlockBesideDevice = std::int64_t{1} << 20U;

/// Where states rest, and in what blocks they visit memory. Never part of the numbers.
struct ResidencyPlan {
  Residency optimizer = Residency::kDevice;  ///< states of the optimizer that have an entry an element, and masters
  Residency parameter = Residency::kDevice;  ///< parameters at rest; from files a unit's come for each use
  Residency gradient = Residency::kDevice;   ///< reduced gradients, and those that wait: kDevice or kHost
  double optimizer_ratio = 1.0;              ///< share of the blocks that is there; the others stay in memory
  std::int64_t block_elements = std::int64_t{1} << 18U;  ///< whose states are one block: a multiple of kBlockElements
  int slots = 4;                                         ///< blocks of files in memory at once
  /// Elements of parameters in files that are in memory at once, gathered ones not counted, at most; 0: as many blocks
  /// as the four largest units have.
  std::int64_t parameter_elements = 0;
  bool chooses_blocks = false;  ///< the engine sets block_elements beside a device: see kBlockBesideDevice
  bool plans_ratio = false;     ///< the engine measures the tiers when it is made, and sets what follows
  /// Which blocks are in files, by their number on a rank; the ratio says it of blocks beyond. Empty: of all.
  std::vector<bool> optimizer_in_files{};
  int cache_blocks = 0;  ///< blocks of files that stay in memory beside the slots, see make_cached_store()
  /// The device has memory of its own, so a state that rests elsewhere crosses a bus. The engine says it.
  bool beside_device = false;
  /// Whether states of this residency rest in blocks of a store.
  [[nodiscard]] bool in_blocks(Residency residency) const {
    return residency == Residency::kFiles || (residency == Residency::kHost && beside_device);
  }
  /// Whether the host makes the update, of sums that a device has.
  [[nodiscard]] bool updates_cross_bus() const { return beside_device && optimizer != Residency::kDevice; }
  bool operator==(const ResidencyPlan&) const = default;
};

/// Numbers that travel between ranks as codes of a few bits, with a scale for each block of elements
/// (kernels/quant/quant.h): a lossy method, and part of the numbers. Vectors and float64 travel as they are.
/// Ref: Wang et al., "ZeRO++", 2023; Xie et al., "LoCo", 2024 (feedback).
struct WireCodes {
  int parameter_bits = 0;  ///< of parameters that are gathered: 8, or 0: they travel as they are
  int gradient_bits = 0;   ///< of gradients that are reduced: 8 or 4, or 0
  /// What codes of gradients miss is added to the rank's next gradients: one more state, of every rank (kRank).
  bool feedback = true;
  /// Runs of so many consecutive ranks, those of a node, sum among themselves first, and their sums travel in codes,
  /// too. Each run keeps what it has gathered of parameters for its further gathers of them, which have no codes. At
  /// most 1: no runs.
  int node_degree = 0;
  std::int64_t block = 256;  ///< elements
  [[nodiscard]] bool any() const { return parameter_bits > 0 || gradient_bits > 0; }
  [[nodiscard]] bool keeps_errors() const { return gradient_bits > 0 && feedback; }
  bool operator==(const WireCodes&) const = default;
};

struct ShardingPlan {
  std::string name{};               ///< for messages: "zero-3"
  std::vector<std::string> axes{};  ///< mesh axes that hold the shards
  Placement parameter = Placement::kReplicate;
  Placement gradient = Placement::kReplicate;
  Placement optimizer = Placement::kReplicate;
  ReductionPolicy policy = ReductionPolicy::kPerMicroStep;
  Reshard reshard = Reshard::kDefault;
  int ring_slots = 2;          ///< slots that the repeated units share, for gathered parameters and for buckets
  int prefetch_units = 1;      ///< units gathered ahead where the device works asynchronously
  bool narrow_buckets = true;  ///< see bucket_dtypes(); false if 16-bit parameters often have fp32 gradients
  int parameter_degree = 0;    ///< of Flat parameters; 0: all ranks
  int optimizer_degree = 0;    ///< of a Flat optimizer; 0: all ranks
  int gradient_degree =
      0;  ///< of the sums of micro-steps, under every placement; 0: all ranks. Part of the numbers, like the policy

  /// Sums of bfloat16 parameters are rounded to bfloat16 before the update, wherever states rest. Part of the numbers,
  /// like the policy. Beside a device, half as many bytes cross the bus.
  bool rounds_sums = false;
  WireCodes codes{};
  ResidencyPlan residency{};
  bool holds_gradients = false;  ///< reduced gradients of a step wait for the next one, in memory of their own
  /// A rank holds all of its own gradients until the update: the optimizer forms messages of them (SignMessages).
  bool holds_messages = false;

  /// The degrees in a world of this size. Throws kConfig unless parameter_degree divides optimizer_degree, that divides
  /// the world, and gradient_degree forms one chain of divisors with them, and WireCodes::node_degree divides the
  /// world.
  [[nodiscard]] Degrees degrees(int world) const;
  /// Throws kUsage for meaningless combinations (a replicated optimizer over sharded gradients, for example).
  void validate() const;
  /// True if a unit must be gathered to compute: from other ranks, from files, or from both.
  [[nodiscard]] bool gathers_parameters() const {
    return parameter == Placement::kFlat || residency.in_blocks(residency.parameter);
  }
  /// True if ranks take parameters from each other, by gathers or by publication.
  [[nodiscard]] bool shares_parameters() const {
    return parameter == Placement::kFlat || optimizer == Placement::kFlat;
  }
  /// True if ranks read each other's parameters in memory, where the transport can. Parameters in files come by
  /// collectives.
  [[nodiscard]] bool shows_parameters() const {
    return shares_parameters() && !residency.in_blocks(residency.parameter);
  }
  /// True if reduced gradients travel to other ranks for their update.
  [[nodiscard]] bool gathers_gradients(int world) const { return degrees(world).sums < world; }
  /// True if other ranks read this rank's sums.
  [[nodiscard]] bool shares_sums(int world) const { return gathers_gradients(world) || degrees(world).sums_groups(); }
  /// True if a rank's sums cross to host memory as soon as they are formed, and rest there. Sums that other ranks take
  /// stay on the device.
  [[nodiscard]] bool sums_leave_device(int world) const {
    return residency.beside_device && residency.gradient == Residency::kHost && !shares_sums(world);
  }
  /// True if the sums of all ranks are gathered into the buckets.
  [[nodiscard]] bool gathers_into_buckets() const { return gradient == Placement::kReplicate; }
  /// True if gradients of several micro-steps are added in a rank's own bucket.
  [[nodiscard]] bool accumulates_in_buckets(int micro_steps) const {
    return policy == ReductionPolicy::kPerStep && micro_steps > 1;
  }
  /// True if every unit needs its own bucket, because all local gradients are held at once.
  [[nodiscard]] bool holds_all_buckets(int micro_steps) const {
    return gradient != Placement::kFlat || holds_messages || accumulates_in_buckets(micro_steps);
  }
  bool operator==(const ShardingPlan&) const = default;
};

/// The plan of ZeRO stage 0 to 3 over `axes`. Throws kConfig for other numbers.
[[nodiscard]] ShardingPlan zero_plan(int zero_stage, std::vector<std::string> axes);
/// Hybrid sharding: all states are split inside groups of `group` consecutive ranks, so each group has all states. Sums
/// are over all ranks.
[[nodiscard]] ShardingPlan hsdp_plan(int group, std::vector<std::string> axes);
/// MiCS: the same plan as hsdp_plan().
[[nodiscard]] ShardingPlan mics_plan(int group, std::vector<std::string> axes);
/// Parameters are split inside groups of `group` consecutive ranks, and the optimizer over all ranks. ZeRO++ (hpZ)
/// keeps a second shard for backward beside that of stage 3; here this second shard is the only one and serves forward
/// too.
[[nodiscard]] ShardingPlan hpz_plan(int group, std::vector<std::string> axes);
/// The plans of all stages, lowest first.
[[nodiscard]] std::vector<ShardingPlan> all_zero_plans(const std::vector<std::string>& axes);

}  // namespace zeroth
