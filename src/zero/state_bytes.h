// StateBytes: entries of one state of one flat, wherever they rest.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroth {

class BlockedStates;

/// A position in a state: in memory, or in blocks that come on leases. A value; it borrows the memory or the blocks.
class StateBytes {
 public:
  StateBytes() = default;
  /// Entries in memory, from `data` on.
  explicit StateBytes(std::byte* data) : data_(data) {}
  /// Entries of row `row` (of those in blocks) of a flat, from the flat's element `element` on.
  StateBytes(BlockedStates& blocks, int flat, int row, std::int64_t element)
      : blocks_(&blocks), flat_(flat), row_(row), element_(element) {}

  /// Null if they are in blocks.
  [[nodiscard]] std::byte* in_memory() const { return data_; }
  /// The position `entries` further on; `dtype` is that of the state.
  [[nodiscard]] StateBytes after(std::int64_t entries, DType dtype) const;

  /// Copy out of blocks, and into them. Block for the tier, and throw its errors.
  void read(std::span<std::byte> out) const;
  void write(std::span<const std::byte> in) const;

 private:
  std::byte* data_ = nullptr;
  BlockedStates* blocks_ = nullptr;
  int flat_ = 0;
  int row_ = 0;
  std::int64_t element_ = 0;
};

}  // namespace zeroth
