// The call board: what each rank of a group has called, in memory that all ranks of the host see. NCCL compares
// nothing; a rank that waits for its device can, without meeting anybody.
#pragma once

#include "comm/shm/control_block.h"

#include <zeroth/comm/backend.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::detail {

/// One board a rank and group; one thread at a time.
///
/// [Note: Board] A call's slot holds the words of its descriptor between two stores of its number: 0 before them, 1 +
/// sequence after. A reader takes a slot only if it finds the same right number before and after it has read the words;
/// all accesses are sequentially consistent. Old calls are overwritten after kSlots more: what a reader was too late
/// for, it does not compare.
class CallBoard {
 public:
  static constexpr std::size_t kSlots = 128;

  /// Collective over `base`, which has windows; blocks.
  CallBoard(CommBackend& base, std::string where);
  CallBoard(const CallBoard&) = delete;
  CallBoard& operator=(const CallBoard&) = delete;

  [[nodiscard]] static std::size_t bytes();

  /// This rank's next call; its sequence is posted() of this rank.
  void post(const CallDescriptor& call);
  /// Calls that a rank has made.
  [[nodiscard]] std::uint64_t posted(int rank) const;
  /// Throws kMismatch for the first call that differs from this rank's, of those below `through` that others have made
  /// by now. Each is compared once.
  void compare(std::uint64_t through, const TagNames& names);

  /// This rank has its communicator.
  void set_open();
  [[nodiscard]] bool open(int rank) const;

 private:
  static constexpr std::size_t kWords = (sizeof(CallDescriptor) + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
  struct Slot {
    SharedWord number;
    SharedWord words[kWords];
  };
  struct Page {
    SharedWord opened;
    SharedWord posted;
    Slot slots[kSlots];
  };

  [[nodiscard]] Page& page(int rank) const;
  [[nodiscard]] bool read(int rank, std::uint64_t sequence, CallDescriptor& call) const;

  std::string where_;
  int rank_;
  int size_;
  Arena arena_;
  PeerWindow window_;
  std::vector<std::uint64_t> compared_;  ///< calls of each rank
};

}  // namespace zeroth::detail
