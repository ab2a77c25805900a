// StateTable: the memory of a plan on one rank that persists from step to step, one row a piece.
//
//   parameter  flat 0  [0, 4096)     float32   degree 4   shared
//   exp_avg    flat 0  [0, 4096)     float32   degree 4
//   sums       flat 0  [0, 4096)     float32   degree 4
//
// Whoever plans, allocates, reports or saves states goes through the rows: a new state is a new row, or a declaration
// of the optimizer. Not in the table: what lives shorter than a step (gathered parameters, buckets) and the words by
// which ranks talk.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/device/memory.h>
#include <zeroth/optim/optimizer.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

enum class StateKind : std::uint8_t {
  kParameter,  ///< at rest, in the dtype of computation
  kMaster,     ///< of 16-bit parameters, see master_of()
  kOptimizer,  ///< declared by the optimizer
  kAverage,    ///< of weights over steps, where a caller keeps one; see ModelMemory::add_state()
  kOuter,      ///< of local updates, see engine/local_updates.h
  kSums,       ///< reduced gradients that have memory of their own, outside of buckets
  kHeld,       ///< those of the step before, whose update is delayed
};

/// The name of StateKind::kHeld: sums over the ranks and micro-steps of a step that was committed.
inline constexpr std::string_view kHeldGradient = "held_gradient";

/// How float32 values of trained 16-bit parameters are kept. The one place that decides it.
enum class Master : std::uint8_t {
  kNone,       ///< the parameter is its own master
  kLowerHalf,  ///< bfloat16: 16 bits beside the parameter, [Note: Masters in two halves]
  kWhole,      ///< float16: a float32 value, of which the parameter is a rounding and no half
};
[[nodiscard]] constexpr Master master_of(DType parameter) noexcept {
  if (parameter == DType::kBFloat16) return Master::kLowerHalf;
  return parameter == DType::kFloat16 ? Master::kWhole : Master::kNone;
}

struct StateRow {
  StateKind kind = StateKind::kParameter;
  int which = 0;       ///< number of the optimizer's state
  std::string name{};  ///< "parameter", "master", "sums", or as the optimizer declares it
  int flat = 0;
  int unit = 0;
  Range range{};   ///< elements of the flat that this rank has the state of
  int degree = 1;  ///< over how many ranks the state is split; 1: every rank has all of it
  StateShape shape = StateShape::kElement;
  std::int64_t entries = 0;  ///< of `dtype`; range.size() where the shape is kElement
  DType dtype = DType::kFloat32;
  double initial = 0.0;  ///< of every entry; parameters come from the model
  Residency residency = Residency::kDevice;
  bool in_blocks = false;  ///< it rests in blocks of a store, see ResidencyPlan::in_blocks()
  bool shared = false;     ///< other ranks read it: it lies in the arena that they attach

  [[nodiscard]] Placement placement() const { return degree == 1 ? Placement::kReplicate : Placement::kFlat; }
  /// Rounded up to kSegmentAlignBytes.
  [[nodiscard]] std::size_t bytes() const;
  /// As which memory it is counted.
  [[nodiscard]] MemoryState memory() const;
};

/// Rows of `rank`: for each flat parameter, master, the optimizer's states in their order, held gradients, sums; those
/// that are empty for this plan are left out. Every rank can compute the rows of all ranks.
[[nodiscard]] std::vector<StateRow> state_table(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                                std::span<const StateDeclaration> states, int micro_steps);

/// Elements of a row of a parameter (StateShape::kRow): all of its elements, if it has fewer than two dimensions.
[[nodiscard]] std::int64_t row_length(const ParamSpec& param);

/// The dtype in which sums of gradients of parameters of `dtype`, whose sums are formed in `accumulation`, come to the
/// update.
[[nodiscard]] constexpr DType dtype_of_sums(const ShardingPlan& plan, DType dtype, DType accumulation) noexcept {
  return plan.rounds_sums && dtype == DType::kBFloat16 ? dtype : accumulation;
}

/// The rows that lie together in blocks of one store.
enum class BlockSet : std::uint8_t {
  kUpdates,     ///< masters and states of the optimizer: what an update needs of the same elements
  kParameters,  ///< what a gather reads
};
inline constexpr BlockSet kBlockSets[] = {BlockSet::kUpdates, BlockSet::kParameters};
/// The set of a row in blocks.
[[nodiscard]] constexpr BlockSet block_set_of(StateKind kind) noexcept {
  return kind == StateKind::kParameter ? BlockSet::kParameters : BlockSet::kUpdates;
}

/// As which memory those of its blocks are counted that rest in memory.
[[nodiscard]] constexpr MemoryState memory_of_blocks(BlockSet set) noexcept {
  return set == BlockSet::kParameters ? MemoryState::kParameter : MemoryState::kOptimizer;
}

/// States of a range of elements of a flat that rest together and visit memory together.
struct StateBlock {
  int flat = 0;
  Range range{};          ///< elements of the flat
  std::size_t bytes = 0;  ///< of all rows of the set, each rounded up to kSegmentAlignBytes
  bool in_files = false;  ///< else in memory
};

/// The blocks of the rows of a set, in the order of flats and elements. Those of rows with Residency::kHost are in
/// memory. Blocks of updates in
/// files are spread among those in memory by ShardingPlan::residency: its optimizer_in_files, or its
/// optimizer_ratio.
[[nodiscard]] std::vector<StateBlock> state_blocks(std::span<const StateRow> rows, const ResidencyPlan& residency,
                                                   BlockSet set);

/// Blocks of a set that a rank has in memory at once, of those that are in files: 2 or more. `rows`: its state table.
/// Of parameters as many as ResidencyPlan::parameter_elements says, and no more than there are.
[[nodiscard]] int block_slots(const ModelLayout& model, const ResidencyPlan& residency, std::span<const StateRow> rows,
                              BlockSet set);
/// Throws kConfig, on all ranks the same, if the parameters of a unit have more blocks than that on some rank: they
/// could not be read ahead of its use.
void require_parameter_slots(const ModelLayout& model, const ShardingPlan& plan);

/// Bytes of a slot of the bus to a device: the sums of a block of elements, and their parameters, or what of them
/// crosses at once; 0 if nothing crosses it on this rank. Slots: ResidencyPlan::slots.
[[nodiscard]] std::size_t bus_slot_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank);
/// Of the memory of the device that belongs to a slot: sums that are rounded before they cross; sums and parameters
/// that rest beside the device, where it updates them.
[[nodiscard]] std::size_t bus_device_bytes(const ModelLayout& model, const ShardingPlan& plan, int rank);
/// Of all slots, on both sides.
[[nodiscard]] std::size_t bus_memory(const ModelLayout& model, const ShardingPlan& plan, int rank);

/// Position of the entry of a flat's element among the row's entries. `element` must be inside a segment and the
/// range.
[[nodiscard]] std::int64_t entry_of(const ModelLayout& model, const StateRow& row, std::int64_t element);

/// As many states of one accumulation value an element as Adam (2) or SGD with momentum (1) has, for plans that know
/// no optimizer.
[[nodiscard]] std::vector<StateDeclaration> element_states(int count);

}  // namespace zeroth
