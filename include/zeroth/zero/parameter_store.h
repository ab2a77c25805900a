// ParameterStore: gathered parameters of units, on leases.
//
// A sharded unit is gathered into its slot while at least one lease on it is out. A replicated unit is always readable,
// and a lease costs nothing. Leases are counted, because several forwards may be outstanding.
//
// If ranks read each other's memory (Capabilities::one_sided), a gather is a pull: wait until each rank's shard has
// this rank's epoch, then copy. No rank overwrites a shard before the commit vote of the step, and every rank votes
// after its last gather; or, with updates inside backward, before all ranks have said that they need it no more.
// Otherwise a gather is a matched all_gather: all ranks must gather the same units in the same
// order, or get kMismatch with the names. The gathered shards are those of all ranks, or of a run of ranks if the plan
// has degrees of sharding.
//
// Parameters in files (ShardingPlan::residency) are gathered in every plan, also where a rank has all of them, and
// always by matched calls: nobody reads from another's memory what may not be there. The recorded order of units says
// what to read ahead:
//
//   use of unit i:   reads of units i+1, i+2, i+3, ... begin    its own blocks -> slot    gather    compute
//
// as far as the blocks in memory go (block_slots()). A unit that nobody foresaw is read on demand, and counted.
// Ref: Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1.3.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace zeroth {

enum class CallPurpose : std::uint8_t;
class CodedGather;
class ModelMemory;
class SubGroupPath;

/// Receives the address of a flat's parameters. `data`: the start of the flat buffer, owned by the store; null when the
/// buffer must no longer be used. Called on the caller's thread, from acquire() and release().
class ParameterBinder {
 public:
  ParameterBinder() = default;
  ParameterBinder(const ParameterBinder&) = delete;
  ParameterBinder& operator=(const ParameterBinder&) = delete;
  virtual ~ParameterBinder() = default;
  virtual void bind(int flat, std::byte* data) = 0;
  /// The parameters of the flat begin to change before step() is called; on the caller's thread, inside of backward.
  virtual void begin_update(int flat) { (void)flat; }
  /// Somebody wrote to the flat's gathered parameters, and what was written goes away now: this rank's own part differs
  /// from where it rests, first in `element`, -1 where that is not known. Must not throw.
  virtual void lose_write(int flat, std::int64_t element) noexcept {
    (void)flat;
    (void)element;
  }
};

class ParameterStore {
 public:
  struct Counters {
    std::uint64_t gathers = 0;           ///< units gathered
    std::uint64_t overflow_slots = 0;    ///< gathers into memory beyond the plan, because their slot was in use
    std::uint64_t order_deviations = 0;  ///< units not used in the order of the previous step
    std::uint64_t demand_fetches = 0;    ///< gathers of units in files that no read had begun for: see above
    int live_slots = 0;                  ///< ring slots in use
    int live_slots_peak = 0;
    std::uint64_t live_bytes = 0;  ///< bytes of parameters gathered now
    std::uint64_t live_bytes_peak = 0;
    void reset_peaks() {
      live_slots_peak = live_slots;
      live_bytes_peak = live_bytes;
    }
  };

  /// Borrows all references, which must outlive it. Several stores may count in one `counters`.
  ParameterStore(const ModelLayout& model, const ShardingPlan& plan, ModelMemory& memory, CommBackend& backend,
                 Device& device, Stream gather_stream, Kernels& kernels, ParameterBinder& binder, Counters& counters);
  ParameterStore(const ParameterStore&) = delete;
  ParameterStore& operator=(const ParameterStore&) = delete;
  ~ParameterStore();

  /// Takes a lease. When this returns, the unit's parameters are bound and readable. May block for other ranks. Throws
  /// kMismatch if ranks have called step() a different number of times, and the errors of the transport.
  void acquire(int unit);
  /// Gives a lease back. The last one unbinds a sharded unit. Never blocks for other ranks.
  void release(int unit) noexcept;
  [[nodiscard]] int leases(int unit) const { return units_[static_cast<std::size_t>(unit)].leases; }

  /// For matched gathers, instead of acquire(): takes part in the gather of a unit that this rank does not need.
  /// Blocks.
  void take_part(int unit);
  /// Forgets the recorded order of units: no prefetch until a whole step has been recorded again. Call it when ranks no
  /// longer use the same units, because all ranks must prefetch the same units.
  void forget_order();
  /// `hook` is called with the unit before each matched gather; never if ranks read each other's parameters.
  void set_before_gather(std::function<void(int unit)> hook) { before_gather_ = std::move(hook); }
  /// `hook` runs in the gather stream before that stream blocks in a matched gather: a runtime with one thread for all
  /// streams runs nothing else meanwhile, and other ranks may wait for what other streams of this rank still have to
  /// do.
  void set_before_blocking(std::function<void()> hook) { before_blocking_ = std::move(hook); }

  /// Blocks for the matched gathers that have been started: other ranks may wait in them for this one.
  void settle_gathers();

  /// Ends all use of the current version: drops prefetched units. Must come before the commit vote of the step, because
  /// ranks overwrite their shards after it. Throws kUsage if a lease of a sharded unit is out.
  void quiesce();
  /// Before the vote, from now on this rank changes what it has at rest of the flat: who still gathers it gets
  /// kMismatch. publish() ends it.
  void begin_update(int flat);
  /// Publishes this rank's updated shards under the next epoch. If replicated parameters had sharded updates, it also
  /// gathers the other ranks' updates and blocks for them.
  void publish();
  /// Version of the parameters: 1 after initialisation, then 1 more with each publish().
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }

  /// Copies the whole flat to `out` (flat.bytes()), without a lease or a slot. Collective, blocks; `out` is null on
  /// ranks that do not need the values. If ranks read each other's parameters, or have all of them, a
  /// rank may call it alone.
  void read(int flat, std::byte* out);

  /// Bytes of control blocks and staging of the groups that were split from the backend.
  [[nodiscard]] std::size_t transport_bytes() const;

  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  struct UnitState {
    int leases = 0;
    bool gathered = false;  ///< its slot holds (or is being filled with) its parameters
    bool bound = false;
    bool updating = false;                   ///< what is at rest changes: the gathered values are those of before
    Event ready{};                           ///< of the gather
    std::vector<std::uint64_t> own_parts{};  ///< digests, one a flat, of what came from files; else empty
    Arena overflow{};
    MemoryHold overflow_hold{};
  };

  void start_gather(int unit);
  /// Of parameters in files: begins to read the unit's blocks on this rank, and those of the units that the recorded
  /// order has next, as many as there is room for. Never blocks.
  void fetch(int unit);
  bool fetch_blocks(int unit);
  void fetch_ahead(int room);
  [[nodiscard]] int num_blocks(int unit) const;
  /// Finds `unit` in the recorded order, at or after where the last one was.
  void follow_order(int unit);
  /// This rank's part of a flat, at degree `group.from()`, in memory: where it rests, or brought to its place in `out`.
  const std::byte* own_part(int flat, std::byte* out, const SubGroupPath& group);
  /// Blocks until the ranks that read this rank's updates in its memory have them: the caller may write there then.
  void await_readers();
  /// Other ranks' updates of a flat, to where it rests here.
  void take_updates(int flat);
  /// Ranks must gather the same units in the same order.
  [[nodiscard]] bool matched() const;
  /// Gathers the parts of the group's ranks into `out`: this rank's part at the group's lower degree.
  void bring(int flat, std::byte* out, SubGroupPath& group, CallPurpose purpose);
  /// bring() of parameters that travel in codes (WireCodes), to what computes.
  void bring_in_codes(int flat, std::byte* out);
  /// What is gathered of the unit's own parts differs from them, or they are not in memory.
  [[nodiscard]] bool compares_digests() const;
  void pull(int flat, std::byte* out, const SubGroupPath& group);
  void require_version(int flat, int rank, const SubGroupPath& group);
  [[noreturn]] void throw_other_version(int flat, int rank, std::uint64_t theirs) const;
  void finish(int unit);
  void drop(int unit) noexcept;
  /// [Note: Lost writes] What somebody writes to a gathered unit goes away with its slot. Each rank compares its own
  /// part with what it has at rest, so that ranks which write alike see every element, for a world-th of the bytes.
  void look_for_writes(int unit) noexcept;
  /// This rank's part of a gathered flat.
  [[nodiscard]] std::span<const std::byte> own_in_slot(int flat);
  /// Own parts that came from files are no longer in memory: their digests are kept.
  void keep_digests(int unit);
  void note_order(int unit);
  void prefetch_next();
  [[nodiscard]] std::byte* flat_data(int flat);
  [[nodiscard]] bool sharded() const { return plan_.gathers_parameters(); }

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  ModelMemory& memory_;
  CommBackend& backend_;
  Device& device_;
  Stream gather_stream_;
  Kernels& kernels_;
  ParameterBinder& binder_;
  std::unique_ptr<SubGroupPath> whole_;    ///< ranks whose parts at rest make the whole flat
  std::unique_ptr<SubGroupPath> at_rest_;  ///< ranks whose updates make this rank's part at rest
  std::unique_ptr<CodedGather> codes_;     ///< null: parameters travel as they are
  /// This rank's part of a flat at the degree of a node, as codes have brought it (keeps_node_parts()).
  struct NodePart {
    std::byte* data = nullptr;
    std::uint64_t epoch = 0;
  };
  std::vector<NodePart> node_parts_;  ///< one a flat
  Arena node_memory_;
  std::vector<MemoryHold> node_holds_;
  std::vector<UnitState> units_;
  std::vector<int> slot_user_;   ///< unit in each gathered slot, -1
  std::vector<int> ring_;        ///< positions among the repeated units
  std::vector<int> order_;       ///< units used in this step, in order
  std::vector<int> last_order_;  ///< the same of the previous step
  bool order_known_ = true;      ///< order_ has all of this step
  std::size_t next_ = 0;         ///< into last_order_: what is expected next, where parameters are in files
  std::function<void(int unit)> before_gather_;
  std::function<void()> before_blocking_;
  std::uint64_t epoch_ = 0;
  Counters& counters_;
};

/// A lease on a unit's gathered parameters. Move-only. The constructor may block (acquire()); the destructor gives the
/// lease back and never blocks.
class [[nodiscard]] UnshardLease {
 public:
  UnshardLease() = default;
  UnshardLease(ParameterStore& store, int unit) : store_(&store), unit_(unit) { store.acquire(unit); }
  UnshardLease(UnshardLease&& other) noexcept : store_(std::exchange(other.store_, nullptr)), unit_(other.unit_) {}
  UnshardLease& operator=(UnshardLease&& other) noexcept {
    if (this != &other) {
      reset();
      store_ = std::exchange(other.store_, nullptr);
      unit_ = other.unit_;
    }
    return *this;
  }
  UnshardLease(const UnshardLease&) = delete;
  UnshardLease& operator=(const UnshardLease&) = delete;
  ~UnshardLease() { reset(); }

  void reset() noexcept {
    if (store_ != nullptr) std::exchange(store_, nullptr)->release(unit_);
  }
  [[nodiscard]] explicit operator bool() const { return store_ != nullptr; }

 private:
  ParameterStore* store_ = nullptr;
  int unit_ = -1;
};

}  // namespace zeroth
