// ModelMemory: everything that a plan keeps in memory on one rank, allocated once, and where the peers' parts of it
// are.
#pragma once

#include <zeroth/comm/backend.h>
#include <zeroth/device/device.h>
#include <zeroth/shard/degrees.h>
#include <zeroth/zero/memory_plan.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace zeroth {

class Signals;

/// Offsets inside the arena that one rank shares with the others; every rank can compute everybody's.
struct SharedLayout {
  std::size_t signals = 0;
  std::vector<std::size_t> parameters{};    ///< one a flat; kNone if not shared
  std::vector<std::size_t> bucket_slots{};  ///< one a bucket slot
  std::vector<std::size_t> reduced{};       ///< one a flat; kNone if not shared, or part of the bucket
  std::size_t bytes = 0;

  static constexpr std::size_t kNone = ~std::size_t{0};
};

[[nodiscard]] SharedLayout make_shared_layout(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                              int micro_steps);

/// Owns the arenas. Addresses never change. Slots are counted from their first use on: a fixed arena gives nothing
/// back.
class ModelMemory {
 public:
  /// Collective where ranks read each other's memory: every rank attaches its shared arena. `optimizer_states` buffers
  /// of the update range per trainable flat.
  ModelMemory(const ModelLayout& model, const ShardingPlan& plan, int optimizer_states, int micro_steps, Device& device,
              CommBackend& backend);
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;
  ~ModelMemory();

  /// Parameters at rest: those of rest_range().
  [[nodiscard]] std::byte* parameters(int flat) const { return parameters_[index(flat)]; }
  /// Where the parameters of `rank`, one of local_peers(), from `element` of the flat on are, which it has at rest, and
  /// the plan shares.
  [[nodiscard]] const std::byte* peer_parameters(int flat, int rank, std::int64_t element) const;
  /// Of the update range of a bfloat16 flat: 16 bits an element that its parameters lack of their fp32 masters
  /// ([Note: Masters in two halves]); zero at first, so that masters are the initial values. Else null.
  [[nodiscard]] std::int16_t* master_low(int flat) const { return reinterpret_cast<std::int16_t*>(at(masters_, flat)); }
  [[nodiscard]] std::byte* state(int flat, int which) const;
  /// This rank's reduced shard, its piece of the sums (accumulation dtype): in memory of its own, or, if
  /// sums_in_bucket(), its range of its own bucket.
  [[nodiscard]] std::byte* reduced(int flat) { return sums_at(flat, model_.flat(flat).shard(rank_).begin); }
  /// What this rank sums while micro-steps accumulate: micro_step_part() of the flat. The piece lies in it.
  [[nodiscard]] std::byte* micro_step_sums(int flat) { return sums_at(flat, micro_step_part(flat).begin); }
  /// Its part at the gradients' degree: the piece, unless the plan has a degree.
  [[nodiscard]] Range micro_step_part(int flat) const { return model_.flat(flat).part(rank_, degrees_.gradient); }
  /// See sums_in_buckets().
  [[nodiscard]] bool sums_in_bucket(int flat) const { return sums_in_buckets_[index(flat)]; }
  /// Other ranks read this one's sums, after the commit vote, where its next gradients or sums will be: so nobody
  /// opens a bucket before all have done with that.
  [[nodiscard]] bool peers_read_sums() const { return peers_read_sums_; }
  /// Another rank's reduced shard, after GradientStore::share_sums().
  [[nodiscard]] const std::byte* peer_reduced(int flat, int rank);
  /// Where the sums of `rank`, one of local_peers(), from `element` of the flat on are, which it has.
  [[nodiscard]] const std::byte* peer_sums(int flat, int rank, std::int64_t element) const;
  /// Where pieces of the sums of what this rank updates come together, its own among them, if the transport is not
  /// one-sided.
  [[nodiscard]] std::byte* gathered_sums(int flat);
  /// See bucket_dtypes().
  [[nodiscard]] DType bucket_dtype(int flat) const { return bucket_dtypes_[index(flat)]; }
  /// Start of the flat inside its bucket slot, for gradients of `dtype`: bucket_dtype(), or the accumulation dtype,
  /// whose slot may be one beyond the plan (overflow). Counts the slot on first use.
  [[nodiscard]] std::byte* bucket(int flat, DType dtype);
  [[nodiscard]] const std::byte* peer_bucket(int flat, int rank, DType dtype) const;
  /// Start of the flat inside its gathered slot; counts the slot on first use.
  [[nodiscard]] std::byte* gathered(int flat);

  /// Words of one of local_peers().
  [[nodiscard]] const Signals& signals(int rank) const;
  /// All ranks read each other's memory.
  [[nodiscard]] bool one_sided() const { return one_sided_; }
  /// The ranks whose memory this one reads: all where the transport is one-sided; those of its node where it is inside
  /// nodes, if degrees make use of that; else this one.
  [[nodiscard]] const SubGroup& local_peers() const { return local_peers_; }
  /// Sub-groups of `degree` ranks consist of local peers. The same on all ranks.
  [[nodiscard]] bool are_local(int degree) const {
    return (one_sided_ || own_seat_) && local_peers_.count % degree == 0;
  }
  /// The group of local_peers(), whose ranks count from its first: for waits and notify().
  [[nodiscard]] CommBackend& seat() const { return *seat_; }
  /// Of the seat, if it is not the backend.
  [[nodiscard]] std::size_t transport_bytes() const { return own_seat_ ? own_seat_->memory_bytes() : 0; }
  [[nodiscard]] const SlotTable& bucket_table() const { return bucket_table_; }
  [[nodiscard]] const SlotTable& gathered_table() const { return gathered_table_; }
  /// Elements that this rank's optimizer updates.
  [[nodiscard]] Range update_range(int flat) const;
  /// Elements that a rank has at rest.
  [[nodiscard]] Range rest_range(int flat, int rank) const;
  [[nodiscard]] const Degrees& degrees() const { return degrees_; }
  [[nodiscard]] int rank() const { return rank_; }
  /// Of the arenas, on this rank. Slow: reads smaps.
  [[nodiscard]] std::uint64_t resident_bytes() const {
    return shared_.resident_bytes() + private_.resident_bytes() + wide_.resident_bytes();
  }

 private:
  [[nodiscard]] static std::size_t index(int flat) { return static_cast<std::size_t>(flat); }
  [[nodiscard]] static std::byte* at(const std::vector<Buffer>& buffers, int flat) {
    return buffers[index(flat)].data();
  }
  [[nodiscard]] Range sums_range(int flat, int rank) const { return zeroth::sums_range(model_, plan_, flat, rank); }
  [[nodiscard]] std::byte* sums_at(int flat, std::int64_t element);
  void allocate_private(Device& device, int optimizer_states);
  void find_neighbours(CommBackend& backend);
  /// By rank of the world; empty for others than local peers.
  [[nodiscard]] PeerWindow window_of(const Arena& arena, std::string_view name) const;

  const ModelLayout& model_;
  const ShardingPlan& plan_;
  Degrees degrees_;
  int rank_;
  bool one_sided_;
  std::unique_ptr<CommBackend> own_seat_;
  CommBackend* seat_;
  SubGroup local_peers_;
  std::vector<DType> bucket_dtypes_;   // one a flat
  std::vector<bool> sums_in_buckets_;  // one a flat
  bool peers_read_sums_;
  SlotTable bucket_table_;
  SlotTable wide_table_;
  SlotTable gathered_table_;
  std::vector<SharedLayout> shared_layouts_;  // one a rank
  Arena shared_;
  Arena private_;
  Arena wide_;  // address space, until a gradient comes that is wider than its bucket
  PeerWindow window_;
  PeerWindow wide_window_;
  std::vector<Signals> signals_;  // one for each of local_peers()
  std::vector<std::byte*> parameters_;
  std::vector<std::byte*> reduced_;
  std::vector<Buffer> masters_;
  std::vector<std::vector<Buffer>> states_;  // [flat][state]
  std::vector<std::span<std::byte>> gathered_slots_;
  std::vector<MemoryHold> gathered_holds_;
  std::vector<MemoryHold> bucket_holds_;
  std::vector<MemoryHold> wide_holds_;
  std::vector<MemoryHold> holds_;
  MemoryLedger& ledger_;
};

}  // namespace zeroth
