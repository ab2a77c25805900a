// ReducedShards: this rank's shards of the reduced gradients, and the sums that go into them.
//
// Where gradients have a degree (Degrees::sums_groups()), events are those of a sub-group, a rank's sums are its
// part at that degree, and its shard is what combine() makes of them and of other sub-groups' at the end of the step.
//
// [Note: Sums in buckets] Where nothing else of the step needs a unit's bucket (sums_in_buckets()), the sums replace
// the local gradients in this rank's own range of its own bucket, which nobody else reads: a shard less of memory.
// Should the bucket be needed after all (a second backward, a late gradient, another unit in the same slot), the flat's
// sums first leave it for memory beyond the plan, and return at the end.
#pragma once

#include "zero/model_memory.h"

#include <kernels/norm/norm.h>
#include <zeroth/compute/kernels.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

namespace zeroth {

/// Memory beyond the plan, and counted so, for gradients or sums of a unit that must make room.
struct Aside {
  Aside(Kernels& kernels, MemoryLedger& ledger, int unit, std::size_t size)
      : memory(kernels.make_scratch(size)), hold(ledger.hold({unit, MemoryState::kOverflow}, size)) {}

  [[nodiscard]] std::byte* data() const { return memory.bytes.data(); }

  Scratch memory;
  MemoryHold hold;
};

/// What one rank gives to a sum: this rank's range of the flat, in the dtype of the bucket or of the sums.
struct Summand {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
};

class ReducedShards {
 public:
  /// `node_sizes`: CommBackend's. `slot_units`: the unit whose bucket lies in each bucket slot, -1; who may change an
  /// entry has waited for the events of that unit.
  /// `host`: kernels of the host, for sums that rest there beside a device.
  ReducedShards(const ModelLayout& model, ModelMemory& memory, Kernels& kernels, Kernels& host, Stream stream,
                MemoryLedger& ledger, std::span<const int> node_sizes, const std::vector<int>& slot_units);

  /// One reduction event: the sum of `sources` (from each rank that took part, in rank order), along the nodes, is
  /// added to what earlier events of the step left, or stored if it is the first.
  void add(int flat, std::span<const Summand> sources);
  /// The same where the transport has left the new sum at ModelMemory::micro_step_sums().
  void arrived(int flat);
  /// A part of a new sum has come to host memory: elements from `at` on of ModelMemory::micro_step_part(). They are
  /// added to what rests there, or stored.
  struct Landed {
    std::int64_t at = 0;
    std::int64_t elements = 0;
    const std::byte* values = nullptr;
    DType dtype = DType::kFloat32;
    bool accumulates = false;
  };
  /// The parts of an event come in order.
  void land(int flat, const Landed& part);
  /// The flat's bucket will hold further gradients of this step, its own or another's: its sums, those of earlier
  /// events and of later ones, lie elsewhere until settle(). No event of the flat may be under way.
  void vacate(int flat);
  /// Whether the flat's unit has its bucket slot at the moment.
  [[nodiscard]] bool has_slot(int flat) const;
  [[nodiscard]] bool is_aside(int flat) const { return aside_.contains(flat); }
  /// Flats whose sums lie elsewhere.
  [[nodiscard]] std::vector<int> vacated() const;
  /// All events have come, no bucket is open, and nobody reads what others left in the slots of vacated(): every sum is
  /// at ModelMemory::micro_step_sums() from now on.
  void settle();
  /// After settle(): the shard is the sum of `sources`, one from each sub-group that has sums, in rank order. This
  /// rank's own may be one.
  void combine(int flat, std::span<const Summand> sources);
  /// The same where the transport has left that sum at ModelMemory::reduced().
  void combined(int flat);
  /// Where the sums of earlier events are before settle(): the elements of ModelMemory::micro_step_part().
  [[nodiscard]] std::byte* sums_so_far(int flat) { return sums(flat); }
  /// They were put there from elsewhere: later events add to them.
  void restored(int flat);
  /// The next event of each flat stores.
  void begin_step();

  /// Whether there are sums of this step.
  [[nodiscard]] bool has_sums(int flat) const { return has_sums_[static_cast<std::size_t>(flat)]; }
  /// Sum of squares of the shard, each times the flat's grad_factor.
  [[nodiscard]] const kernels::NormAccumulator& norm(int flat) const {
    return norms_[static_cast<std::size_t>(flat)].value();
  }

 private:
  [[nodiscard]] std::byte* sums(int flat);
  void forget_asides();
  /// Adds up `sources`, `n` elements of each, at `target`, along the nodes, with the norm of the sum.
  void sum(int flat, std::byte* target, std::int64_t n, std::span<const Summand> sources, bool accumulate);
  /// The norm of `n` elements of a sum that is at `target`.
  void measure(int flat, const std::byte* target, std::int64_t n);

  const ModelLayout& model_;
  ModelMemory& memory_;
  Kernels& kernels_;
  Kernels& host_;
  Stream stream_;  ///< of reductions
  MemoryLedger& ledger_;
  std::vector<int> node_of_;  ///< each rank
  const std::vector<int>& slot_units_;
  std::map<int, Aside> aside_;  ///< by flat
  std::vector<bool> has_sums_;
  std::vector<PendingNorm> norms_;  ///< one a flat, of its last event
};

}  // namespace zeroth
