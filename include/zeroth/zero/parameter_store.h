// ParameterStore: gathered parameters of units, on leases.
//
// A unit that rests sharded is gathered into its slot while at least one lease on it is out; a unit that rests
// replicated is always there and a lease costs nothing. "Gathered" is a count, not a state: several forwards may be
// outstanding. Where peers read each other's memory (Capabilities::one_sided) a gather is a pull: wait until each
// rank's shard has this rank's epoch, copy. No rank overwrites a shard before the commit vote of the step, which every
// rank passes after its last gather. Elsewhere a gather is a matched all_gather: all ranks take the same units in the
// same order, or hear by name what the others took. Whose shards make a whole depends on the degrees of sharding: all
// ranks', or those of a sub-group of them.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/device/device.h>
#include <zeroth/zero/kernel_context.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace zeroth {

enum class CallPurpose : std::uint8_t;
class ModelMemory;
class SubGroupPath;

/// Told where the parameters of a flat are. `data` is the start of the flat buffer, or null when it may no longer be
/// touched. Called on the caller's thread, from unshard and release.
class ParameterBinder {
 public:
  ParameterBinder() = default;
  ParameterBinder(const ParameterBinder&) = delete;
  ParameterBinder& operator=(const ParameterBinder&) = delete;
  virtual ~ParameterBinder() = default;
  virtual void bind(int flat, std::byte* data) = 0;
};

class ParameterStore {
 public:
  ParameterStore(const ModelLayout& model, const ShardingPlan& plan, ModelMemory& memory, CommBackend& backend,
                 Device& device, Stream gather_stream, KernelContext kernels, ParameterBinder& binder);
  ParameterStore(const ParameterStore&) = delete;
  ParameterStore& operator=(const ParameterStore&) = delete;
  ~ParameterStore();

  /// Takes a lease: when this returns, the unit's parameters are bound and readable. May block for peers.
  void acquire(int unit);
  /// Gives a lease back; the last one unbinds a sharded unit.
  void release(int unit) noexcept;
  [[nodiscard]] int leases(int unit) const { return units_[static_cast<std::size_t>(unit)].leases; }

  /// Instead of acquire(), where gathers are matched calls: this rank's part in one of the unit, whose values it does
  /// not need.
  void take_part(int unit);
  /// Nothing is prefetched until a step has been taken from beginning to end. For when ranks do not take the same
  /// units: what they prefetch must be the same.
  void forget_order();
  /// Called with the unit before each matched gather of a unit, and not where ranks read each other's parameters.
  void set_before_gather(std::function<void(int unit)> hook) { before_gather_ = std::move(hook); }

  /// Ends all use of the current version: gives prefetched units back. Throws kUsage if a lease of a sharded unit is
  /// out. Must come before the commit vote of the step, after which peers overwrite their shards.
  void quiesce();
  /// Marks this rank's shards as updated, and brings replicated parameters up to date where updates were sharded
  /// (blocks).
  void publish();
  /// Version of the parameters: 1 after initialisation, +1 a step.
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }

  /// Copies the whole flat into `out` (flat.bytes()), without a lease or a slot. Blocks for peers. Collective; `out` is
  /// null on ranks that do not want it. Where ranks read each other's parameters, the others need not call.
  void read(int flat, std::byte* out);

  /// Control blocks and staging of groups inside the backend's.
  [[nodiscard]] std::size_t transport_bytes() const;

  struct Counters {
    std::uint64_t gathers = 0;           ///< units gathered
    std::uint64_t overflow_slots = 0;    ///< gathers whose slot was taken and that got memory beyond the plan
    std::uint64_t order_deviations = 0;  ///< units not taken in the order of the step before
    int live_slots = 0;                  ///< ring slots in use
    int live_slots_peak = 0;
    std::uint64_t live_bytes = 0;  ///< parameters gathered now
    std::uint64_t live_bytes_peak = 0;
  };
  [[nodiscard]] const Counters& counters() const { return counters_; }
  void reset_peaks();

 private:
  struct UnitState {
    int leases = 0;
    bool gathered = false;  ///< its slot holds (or is being filled with) its parameters
    bool bound = false;
    Event ready{};  ///< of the gather
    Arena overflow{};
    MemoryHold overflow_hold{};
  };

  void start_gather(int unit);
  /// What the group's ranks have into `out`, which gets this rank's part at its lower degree.
  void bring(int flat, std::byte* out, SubGroupPath& group, CallPurpose purpose);
  void pull(int flat, std::byte* out, const SubGroupPath& group);
  void require_version(int flat, int rank, const SubGroupPath& group);
  void finish(int unit);
  void drop(int unit) noexcept;
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
  KernelContext kernels_;
  ParameterBinder& binder_;
  std::unique_ptr<SubGroupPath> whole_;    ///< whose parts at rest make a whole
  std::unique_ptr<SubGroupPath> at_rest_;  ///< whose updates make what this rank has at rest
  std::vector<UnitState> units_;
  std::vector<int> slot_user_;   ///< unit in each gathered slot, -1
  std::vector<int> ring_;        ///< positions among the repeated units
  std::vector<int> order_;       ///< units taken in this step
  std::vector<int> last_order_;  ///< and in the one before
  bool order_known_ = true;      ///< order_ has all of this step
  std::function<void(int unit)> before_gather_;
  std::uint64_t epoch_ = 0;
  Counters counters_;
};

/// Possession of a unit's gathered parameters. Move-only; gives back in the destructor, which never blocks.
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
