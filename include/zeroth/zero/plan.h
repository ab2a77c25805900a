// ShardingPlan: a placement for each state. ZeRO 0-3 are four values of it, made in zero_plan() and read nowhere else
// as numbers.
//
//   stage   parameter   between forward and backward   gradient    optimizer
//   0       Replicate   Replicate                       Replicate   Replicate
//   1       Replicate   Replicate                       Partial     Flat
//   2       Replicate   Replicate                       Flat        Flat
//   3       Flat        Flat (or Replicate: reshard)    Flat        Flat
//
// Flat over how many ranks is the degree of the state (shard/degrees.h): all of them, or sub-groups of fewer, so that
// what is gathered often comes from near. Replicate is degree 1. Where the optimizer's degree is below the number of
// ranks, sums travel to the ranks that need them; where it is above the parameters', updated parameters do. Neither
// changes a number: sums are formed over all ranks, piece by piece, as under every plan.
//
// The gradients' degree does: it says over which ranks the gradients of a micro-step are summed, sub-groups of that
// many. A rank adds up what its sub-group has of its part, and the sums of the sub-groups are added once, at the end of
// the step. As with the reduction policy, every plan of one gradient degree has the same bits, and those of another one
// may differ in the last place.
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

/// When gradients are reduced while micro-steps accumulate. Part of the numbers: changing it may change bits.
enum class ReductionPolicy : std::uint8_t {
  kPerMicroStep,  ///< sum over ranks after every backward, accumulate the sums (memory of a shard)
  kPerStep,       ///< accumulate locally, sum over ranks once (memory of all gradients, less traffic)
};

/// Which units give their gathered parameters back after forward.
enum class Reshard : std::uint8_t {
  kDefault,  ///< all but the last repeated unit and those that are not repeated (they stay until backward has used
             ///< them)
  kAll,
  kNone,  ///< everything stays gathered from forward to backward
};

[[nodiscard]] std::string_view name_of(ReductionPolicy policy) noexcept;
[[nodiscard]] std::string_view name_of(Reshard reshard) noexcept;

/// Over how many ranks each state is split, in a world; 1: every rank has all of it.
struct Degrees {
  int parameter = 1;
  int gradient = 1;  ///< sums while micro-steps accumulate
  int sums = 1;      ///< reduced gradients during the update; before it the whole world
  int optimizer = 1;
  int world = 1;
  /// The gradients of a micro-step are summed in sub-groups, and those sums once a step.
  [[nodiscard]] bool sums_groups() const { return gradient < world; }
  /// From one degree down to a lower one over those between: only from each to the next are parts in the order of their
  /// ranks (degrees.h).
  [[nodiscard]] std::vector<int> path(int from, int to) const;
  bool operator==(const Degrees&) const = default;
};

struct ShardingPlan {
  std::string name{};               ///< for people: "zero-3"
  std::vector<std::string> axes{};  ///< mesh axes that hold the shards
  Placement parameter = Placement::kReplicate;
  Placement gradient = Placement::kReplicate;
  Placement optimizer = Placement::kReplicate;
  ReductionPolicy policy = ReductionPolicy::kPerMicroStep;
  Reshard reshard = Reshard::kDefault;
  int ring_slots = 2;          ///< slots that the repeated units share, for gathered parameters and for buckets
  int prefetch_units = 1;      ///< units gathered ahead where the device works asynchronously
  bool narrow_buckets = true;  ///< see bucket_dtypes(); false where a program gives fp32 gradients of 16-bit parameters
  int parameter_degree = 0;    ///< of Flat parameters; 0: all ranks
  int optimizer_degree = 0;    ///< of a Flat optimizer; 0: all ranks
  int gradient_degree =
      0;  ///< of the sums of micro-steps, under every placement; 0: all ranks. Part of the numbers, like the policy

  /// Throws kConfig unless parameter_degree divides optimizer_degree and that the world, and gradient_degree is one of
  /// a chain with them.
  [[nodiscard]] Degrees degrees(int world) const;
  /// Throws kUsage for combinations that have no meaning (say, a replicated optimizer over sharded gradients).
  void validate() const;
  /// A gathered copy is needed to compute.
  [[nodiscard]] bool gathers_parameters() const { return parameter == Placement::kFlat; }
  /// Ranks take parameters from each other, one way or the other.
  [[nodiscard]] bool shares_parameters() const { return gathers_parameters() || optimizer == Placement::kFlat; }
  /// Reduced gradients travel to the others who update with them.
  [[nodiscard]] bool gathers_gradients(int world) const { return degrees(world).sums < world; }
  /// Other ranks read this one's sums, one way or the other.
  [[nodiscard]] bool shares_sums(int world) const { return gathers_gradients(world) || degrees(world).sums_groups(); }
  /// All of them, into the buckets.
  [[nodiscard]] bool gathers_into_buckets() const { return gradient == Placement::kReplicate; }
  /// Gradients of several micro-steps are added in a rank's own bucket.
  [[nodiscard]] bool accumulates_in_buckets(int micro_steps) const {
    return policy == ReductionPolicy::kPerStep && micro_steps > 1;
  }
  /// Every unit must have a bucket of its own, because all local gradients are held at once.
  [[nodiscard]] bool holds_all_buckets(int micro_steps) const {
    return gradient != Placement::kFlat || accumulates_in_buckets(micro_steps);
  }
  bool operator==(const ShardingPlan&) const = default;
};

/// The plan of ZeRO stage 0 to 3 over `axes`. Throws kConfig for other numbers.
[[nodiscard]] ShardingPlan zero_plan(int zero_stage, std::vector<std::string> axes);
/// Hybrid sharding: all states are split inside groups of `group` consecutive ranks, and each group has all of them.
/// Sums are over all ranks.
[[nodiscard]] ShardingPlan hsdp_plan(int group, std::vector<std::string> axes);
/// MiCS partitions all states inside a group as well; the plan is that of hsdp_plan().
[[nodiscard]] ShardingPlan mics_plan(int group, std::vector<std::string> axes);
/// Parameters are gathered inside groups of `group` consecutive ranks, and the optimizer is split over all ranks. The
/// shard that ZeRO++ (hpZ) keeps beside the one of stage 3, for backward, is the only one here, and serves forward too.
[[nodiscard]] ShardingPlan hpz_plan(int group, std::vector<std::string> axes);
/// The plans of all stages, lowest first.
[[nodiscard]] std::vector<ShardingPlan> all_zero_plans(const std::vector<std::string>& axes);

}  // namespace zeroth
