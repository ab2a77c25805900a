// ModelMemory: the memory of a plan on one rank, allocated once, and the addresses of the other ranks' shared parts.
#pragma once

#include "zero/blocked_states.h"
#include "zero/device_bus.h"
#include "zero/exchange_choice.h"
#include "zero/state_bytes.h"

#include <zeroth/comm/backend.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/zero/memory_plan.h>
#include <zeroth/zero/state_table.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

class Signals;

/// Byte offsets inside the arena that one rank shares. Every rank can compute the offsets of all ranks.
struct SharedLayout {
  std::vector<std::size_t> parameters{};    ///< one per flat; kNone if not shared
  std::vector<std::size_t> bucket_slots{};  ///< one per bucket slot
  std::vector<std::size_t> reduced{};       ///< one per flat; kNone if not shared, or part of the bucket
  std::size_t bytes = 0;

  static constexpr std::size_t kNone = ~std::size_t{0};
};

[[nodiscard]] SharedLayout make_shared_layout(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                              int micro_steps);

class ModelMemory;

/// Addresses of the states of some elements of a flat, for one update. Move-only; states in blocks are leased as long.
class [[nodiscard]] StateView {
 public:
  /// From the entry of `element` on, which must be among the elements: of optimizer state number `which`, null where
  /// this rank's piece (StateShape::kPiece) has it not;
  [[nodiscard]] std::byte* state(int which, std::int64_t element) const;
  /// of the lower halves of the masters of a bfloat16 flat, else null ([Note: Masters in two halves]);
  [[nodiscard]] std::int16_t* master_low(std::int64_t element) const;
  /// of the fp32 masters of a float16 flat, else null.
  [[nodiscard]] float* master(std::int64_t element) const;
  /// of the parameters at rest.
  [[nodiscard]] std::byte* parameter(std::int64_t element) const;

 private:
  friend class ModelMemory;
  [[nodiscard]] std::byte* master_at(Master kind, std::int64_t element) const;
  const ModelMemory* memory_ = nullptr;
  int flat_ = 0;
  BlockLease lease_;
  BlockLease parameters_;
};

/// Owns the arenas. Addresses never change. The ledger counts a slot from its first use on, and never releases it.
class ModelMemory {
 public:
  /// Collective and blocking if ranks read each other's memory: every rank attaches its shared arena. Allocates the
  /// rows of state_table(). Borrows all references but `files`, which must outlive it. Throws kOutOfMemory, kResource,
  /// kIo, and the errors of the transport.
  ModelMemory(const ModelLayout& model, const ShardingPlan& plan, std::span<const StateDeclaration> states,
              int micro_steps, Device& device, Kernels& kernels, CommBackend& backend, const StateFiles& files = {});
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;
  ~ModelMemory();

  /// This rank's parameters at rest: the elements of rest_range(), in the flat's dtype. Null if they are in blocks.
  [[nodiscard]] std::byte* parameters(int flat) const { return parameters_[index(flat)].in_memory(); }
  /// The same wherever they rest.
  [[nodiscard]] const StateBytes& parameters_at_rest(int flat) const { return parameters_[index(flat)]; }
  /// From `element` of the flat on.
  [[nodiscard]] StateBytes parameters_from(int flat, std::int64_t element) const;
  /// The blocks of parameters that rest in blocks; null if they are where they are used.
  [[nodiscard]] BlockedStates* filed_parameters() const { return filed_parameters_.get(); }
  /// See BlockedStates::reset().
  void reset_blocks() {
    if (blocked_) blocked_->reset();
    if (filed_parameters_) filed_parameters_->reset();
  }
  /// Parameters are computed with where they rest.
  [[nodiscard]] bool shows_rest() const { return !plan_.gathers_parameters(); }
  /// Address of element `element` of the flat in the parameters at rest of `rank`. `rank` must be one of local_peers()
  /// and have the element at rest; the plan must share parameters.
  [[nodiscard]] const std::byte* peer_parameters(int flat, int rank, std::int64_t element) const;
  /// The elements whose states come together with those of `element`, which must be inside the update range: a block,
  /// or the whole update range. Where something crosses a bus: no more than a slot of it has room for.
  [[nodiscard]] Range together(int flat, std::int64_t element) const;
  /// The states of elements that come together. Blocks for a tier. Masters start as the initial values.
  [[nodiscard]] StateView view(int flat, std::int64_t element, Access access);
  /// Starts to bring the states that come together with those of `element`. Never blocks. False: all of them are in
  /// memory for ever.
  bool prefetch_states(int flat, std::int64_t element);
  /// Views of states in files that may be prefetched beyond the one in use; 0 if no state is in files.
  [[nodiscard]] int views_ahead() const;
  /// Between the host and a device with memory of its own; null if no state rests beside the device.
  [[nodiscard]] DeviceBus* bus() const { return bus_.get(); }
  /// The host makes the update, and its sums cross the bus.
  [[nodiscard]] bool updates_cross_bus() const { return bus_ && plan_.residency.updates_cross_bus(); }
  /// Brings parameters at rest that are in blocks, from `element` on, to `to`, memory of the kernels. On a device: in
  /// `stream`. Blocks for files.
  void bring_parameters(int flat, std::int64_t element, std::span<std::byte> to, const Stream& stream);
  /// The other way. `stream`: of what made them. Blocks.
  void keep_parameters(int flat, std::int64_t element, std::span<const std::byte> from, const Stream& stream);
  /// The store of a set of states in blocks; null if there are none.
  [[nodiscard]] const StateStore* state_store(BlockSet set) const {
    const BlockedStates* blocks = (set == BlockSet::kUpdates ? blocked_ : filed_parameters_).get();
    return blocks == nullptr ? nullptr : &blocks->store();
  }
  /// Where the masters of the update range of a 16-bit flat are; nothing for other flats.
  [[nodiscard]] StateBytes masters(int flat) const;
  /// This rank's states, each with its memory.
  struct Placed {
    StateRow row;
    StateBytes at;  ///< its first entry
  };
  [[nodiscard]] const std::vector<Placed>& states() const { return states_; }
  /// A further state of every trainable parameter, of the accumulation dtype, where the optimizer's states are: zeros.
  /// Its rows come last in states(). Throws kOutOfMemory.
  void add_state(Kernels& kernels, StateKind kind, const std::string& name);
  /// Bytes of all that add_state() has added; planned_memory() of a plan does not have them.
  [[nodiscard]] std::size_t added_bytes() const;
  /// This rank's reduced shard: its piece of the sums, in the accumulation dtype. It lies in separate memory, or, if
  /// sums_in_bucket(), in its range of its own bucket.
  [[nodiscard]] std::byte* reduced(int flat) { return sums_at(flat, model_.flat(flat).shard(rank_).begin); }
  /// The sums of micro_step_part() while micro-steps accumulate, in the accumulation dtype. They contain the piece.
  [[nodiscard]] std::byte* micro_step_sums(int flat) { return sums_at(flat, micro_step_part(flat).begin); }
  /// This rank's part at the gradients' degree; without a gradient degree it is the piece.
  [[nodiscard]] Range micro_step_part(int flat) const { return model_.flat(flat).part(rank_, degrees_.gradient); }
  /// The sums of update_range() of the step before, in the accumulation dtype; null unless the plan holds_gradients.
  [[nodiscard]] std::byte* held(int flat) const { return held_[index(flat)]; }
  /// The sums rest in host memory beside the device, see ShardingPlan::sums_leave_device().
  [[nodiscard]] bool sums_leave_device() const { return plan_.sums_leave_device(model_.world); }
  /// The same of held().
  [[nodiscard]] bool held_beside_device() const {
    return plan_.residency.beside_device && plan_.residency.gradient == Residency::kHost;
  }
  /// Slots of bus().
  [[nodiscard]] int bus_slots() const { return plan_.residency.slots; }
  /// Elements of a flat that cross in one of them.
  [[nodiscard]] std::int64_t bus_elements() const { return plan_.residency.block_elements; }
  /// See sums_in_buckets().
  [[nodiscard]] bool sums_in_bucket(int flat) const { return sums_in_buckets_[index(flat)]; }
  /// True if other ranks read this rank's sums after the commit vote, in memory of its next gradients or sums. Then no
  /// rank opens a bucket before all ranks have finished reading.
  [[nodiscard]] bool peers_read_sums() const { return peers_read_sums_; }
  /// The reduced shard of another rank, after GradientStore::share_sums().
  [[nodiscard]] const std::byte* peer_reduced(int flat, int rank);
  /// Address of element `element` of the flat in the sums of `rank`, which must be one of local_peers() and have the
  /// element.
  [[nodiscard]] const std::byte* peer_sums(int flat, int rank, std::int64_t element) const;
  /// Memory into which the pieces of this rank's update range are gathered, its own included, if the transport is not
  /// one-sided.
  [[nodiscard]] std::byte* gathered_sums(int flat);
  /// See bucket_dtypes().
  [[nodiscard]] DType bucket_dtype(int flat) const { return bucket_dtypes_[index(flat)]; }
  /// Start of the flat inside its bucket slot, for gradients of `dtype`: bucket_dtype() or the accumulation dtype. The
  /// slot of the latter may be beyond the plan (overflow). The slot is counted on first use.
  [[nodiscard]] std::byte* bucket(int flat, DType dtype);
  /// The same in the memory of another of local_peers(). Not counted.
  [[nodiscard]] const std::byte* peer_bucket(int flat, int rank, DType dtype) const;
  /// Start of the flat inside its gathered slot. The slot is counted on first use.
  [[nodiscard]] std::byte* gathered(int flat);

  /// The signals of one of local_peers().
  [[nodiscard]] const Signals& signals(int rank) const;
  /// True if all ranks read each other's memory.
  [[nodiscard]] bool one_sided() const { return one_sided_; }
  /// The ranks whose memory this rank reads: all ranks if the transport is one-sided; the ranks of its node if the
  /// transport is one-sided inside nodes and a degree of sharding uses that; otherwise this rank only.
  [[nodiscard]] const SubGroup& local_peers() const { return local_peers_; }
  /// True if the ranks of each sub-group of `degree` ranks read each other's memory. The same on all ranks; not so of
  /// parameters in files.
  [[nodiscard]] bool are_local(int degree) const {
    return (one_sided_ || node_group_) && local_peers_.count % degree == 0;
  }
  /// The group of local_peers(), for waits and notify(). Rank 0 of this group is the first of local_peers().
  [[nodiscard]] CommBackend& local_group() const { return *local_group_; }
  /// Bytes of control blocks and staging of local_group(); 0 if local_group() is the backend.
  [[nodiscard]] std::size_t transport_bytes() const { return node_group_ ? node_group_->memory_bytes() : 0; }
  [[nodiscard]] const SlotTable& bucket_table() const { return bucket_table_; }
  [[nodiscard]] const SlotTable& gathered_table() const { return gathered_table_; }
  /// Elements that this rank's optimizer updates.
  [[nodiscard]] Range update_range(int flat) const;
  /// Elements of the flat's parameters that a rank has at rest.
  [[nodiscard]] Range rest_range(int flat, int rank) const;
  /// The dtype in which the flat's sums come to the update.
  [[nodiscard]] DType update_dtype(int flat) const {
    return dtype_of_sums(plan_, model_.flat(flat).dtype, model_.flat(flat).accumulation());
  }
  [[nodiscard]] const Degrees& degrees() const { return degrees_; }
  [[nodiscard]] const ShardingPlan& plan() const { return plan_; }
  /// What codes of the flat's gradients have missed: [length] float32, null where nothing keeps it (WireCodes).
  [[nodiscard]] float* reduction_errors(int flat) const { return reduction_errors_[index(flat)]; }
  [[nodiscard]] int rank() const { return rank_; }
  /// Resident bytes of this rank's arenas. Slow: reads smaps.
  [[nodiscard]] std::uint64_t resident_bytes() const {
    return signal_words_.resident_bytes() + shared_.resident_bytes() + private_.resident_bytes() +
           host_.resident_bytes() + wide_.resident_bytes() + added_resident_bytes() +
           (blocked_ ? blocked_->resident_bytes() : 0) + (filed_parameters_ ? filed_parameters_->resident_bytes() : 0);
  }

 private:
  friend class StateView;
  [[nodiscard]] static std::size_t index(int flat) { return static_cast<std::size_t>(flat); }
  [[nodiscard]] bool has_master(int flat, Master kind) const { return master_of(model_.flat(flat).dtype) == kind; }
  [[nodiscard]] Range sums_range(int flat, int rank) const { return zeroth::sums_range(model_, plan_, flat, rank); }
  [[nodiscard]] std::byte* sums_at(int flat, std::int64_t element);
  [[nodiscard]] const Placed& state_row(int flat, int which) const {
    return states_[first_state_[index(flat)] + static_cast<std::size_t>(which)];
  }
  void place_states(Kernels& kernels, std::span<const StateDeclaration> states, int micro_steps,
                    std::span<std::byte> shared, Device& device, const StateFiles& files);
  /// body(slot of the bus, place, first byte, bytes) for each block of parameters: so none is leased twice.
  template <class Body>
  void for_slots(int flat, std::int64_t element, std::size_t bytes, const Body& body);
  void find_neighbours(CommBackend& backend);
  [[nodiscard]] std::uint64_t added_resident_bytes() const;
  /// Memory that local peers read, zeroed.
  [[nodiscard]] Arena make_window(Device& device, Kernels& kernels, std::size_t bytes, std::string_view name) const;
  /// The attached arenas by world rank; empty for all other ranks.
  [[nodiscard]] PeerWindow window_of(const Arena& arena, std::string_view name) const;

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  Degrees degrees_;
  int rank_;
  ExchangeChoice choice_;
  bool one_sided_;
  std::unique_ptr<CommBackend> node_group_;
  CommBackend* local_group_;
  SubGroup local_peers_;
  std::vector<DType> bucket_dtypes_;   // one a flat
  std::vector<bool> sums_in_buckets_;  // one a flat
  bool peers_read_sums_;
  SlotTable bucket_table_;
  SlotTable wide_table_;
  SlotTable gathered_table_;
  std::vector<SharedLayout> shared_layouts_;  // one a rank
  Arena signal_words_;                        // of the host, wherever the states are
  Arena shared_;
  Arena private_;
  Arena host_;  // states without blocks that rest beside a device
  std::vector<Arena> added_;
  Arena wide_;  // address space, until a gradient comes that is wider than its bucket
  PeerWindow signal_window_;
  PeerWindow window_;
  PeerWindow wide_window_;
  std::vector<Signals> signals_;  // one for each of local_peers()
  std::vector<Placed> states_;
  std::unique_ptr<BlockedStates> blocked_;           // null: masters and optimizer's states are where they are used
  std::unique_ptr<BlockedStates> filed_parameters_;  // null: parameters are where they are used
  std::unique_ptr<DeviceBus> bus_;
  // Into states_, one a flat, null where there is none.
  std::vector<StateBytes> parameters_;
  std::vector<std::byte*> reduced_;
  std::vector<std::byte*> held_;
  std::vector<float*> reduction_errors_;
  std::vector<int> masters_;              // into states_, one a flat; -1: none
  std::vector<std::size_t> first_state_;  // of the optimizer's rows
  std::vector<std::span<std::byte>> gathered_slots_;
  std::vector<MemoryHold> gathered_holds_;
  std::vector<MemoryHold> bucket_holds_;
  std::vector<MemoryHold> wide_holds_;
  std::vector<MemoryHold> holds_;
  MemoryLedger& ledger_;
};

}  // namespace zeroth
