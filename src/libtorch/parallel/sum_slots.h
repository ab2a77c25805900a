// SumSlots: memory that the ranks of a group read from each other, for sums that are under way.
#pragma once

#include "libtorch/parallel/group_call.h"

#include <zeroth/comm/backend.h>
#include <zeroth/device/memory.h>
#include <zeroth/libtorch/rank_group.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

/// One part of a sum on every rank. [Note: Slots]
///
/// Each rank owns an arena a slot: a header and the own part. `given` is the number of the sum whose part lies there,
/// `taken` of the last sum for which this rank has read the parts of all ranks. A rank writes its part of sum n when
/// all ranks have taken sum n-1, stores given = n, and rings; a reader waits for given >= n on all ranks, adds, and
/// stores taken = n. The choice of a slot depends only on the starts and waits that this rank has made, which are the
/// same on all ranks: so all use the same slots, and make new ones together. A sum that is never taken (its PendingSum
/// is gone) keeps its slot until one is needed: then ranks ask each other which sums all of them have given up.
struct SumSlot {
  struct Header {
    std::uint64_t given = 0;
    std::uint64_t taken = 0;
    std::uint64_t shape = 0;  ///< hash of dtype and shape of the part
  };
  static constexpr std::size_t kHeaderBytes = 128;

  Arena arena;
  PeerWindow window;
  std::size_t capacity = 0;  ///< bytes of a part
  std::uint64_t sums = 0;    ///< started so far
  std::uint64_t last = 0;    ///< number of its last sum among all of the group
  bool in_use = false;       ///< started and not taken

  [[nodiscard]] Header& header(std::size_t rank) const;
  [[nodiscard]] std::byte* part(std::size_t rank) const;
};

class SumSlots {
 public:
  /// True if the ranks of the group can read each other's memory and form sums in plain rank order, and `part` is in
  /// memory of the host.
  [[nodiscard]] static bool serves(const RankGroup& group, const at::Tensor& part);

  /// Lays the own part down. Blocks while a rank has not taken the sum before the last in this slot; the first calls
  /// are collective.
  [[nodiscard]] std::shared_ptr<SumSlot> give(const at::Tensor& part, const CallName& name, const RankGroup& group);
  /// The sum of the parts in a slot; `like`: the own one.
  [[nodiscard]] at::Tensor take(SumSlot& slot, const at::Tensor& like, const CallName& name,
                                const RankGroup& group) const;
  [[nodiscard]] std::size_t size() const { return slots_.size(); }

 private:
  [[nodiscard]] std::shared_ptr<SumSlot> free_slot(std::size_t bytes, const RankGroup& group);
  void reclaim(const RankGroup& group);

  std::vector<std::shared_ptr<SumSlot>> slots_;
  std::uint64_t starts_ = 0;
};

}  // namespace zeroth::libtorch
