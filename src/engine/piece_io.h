// Values of a StatePiece out of the memory of its rank, and into it.
#pragma once

#include "engine/state_pieces.h"

#include <zeroth/compute/kernels.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace zeroth {

/// Reads values as `piece.dtype` says: float32 masters joined, sums of gradients scaled. Borrows all arguments.
class PieceReader {
 public:
  PieceReader(const StatePiece& piece, Kernels& kernels, const Stream& stream)
      : piece_(piece), kernels_(kernels), stream_(stream) {}

  /// Calls write(bytes) for parts that make up piece.writes, in order. The bytes are good until the next part.
  void each(const std::function<void(std::span<const std::byte>)>& write);
  /// The same for elements `range` of the box, inside of piece.has (of piece.master_range, where there are masters).
  void each_of(const Range& range, const std::function<void(std::span<const std::byte>)>& write);
  /// All of `range` at once.
  [[nodiscard]] std::vector<std::byte> all_of(const Range& range);

 private:
  [[nodiscard]] std::span<const std::byte> values(std::int64_t at, std::int64_t n);
  [[nodiscard]] std::span<const std::byte> on_host(const StateBytes& from, std::size_t bytes,
                                                   std::vector<std::byte>& copy);
  [[nodiscard]] std::span<const std::byte> scaled(std::span<const std::byte> sums);

  const StatePiece& piece_;
  Kernels& kernels_;
  const Stream& stream_;
  std::vector<std::byte> values_;
  std::vector<std::byte> high_;
  std::vector<std::byte> low_;
  std::vector<float> masters_;
};

/// Puts values of all of piece.has where they belong. Blocks.
void store(const StatePiece& piece, std::span<const std::byte> values, Kernels& kernels, const Stream& stream);

/// What values are that a caller writes to a weight.
enum class WeightValues : std::uint8_t {
  kMaster,     ///< of the update: float32 where a 16-bit parameter has masters
  kParameter,  ///< in the parameter's dtype: an element that does not change keeps its master to the bit
};

/// Puts values of the box's elements from `begin` on, inside of piece.has, where they belong; `piece` is a weight.
/// Blocks.
void store_weights(const StatePiece& piece, std::int64_t begin, std::span<const std::byte> values, WeightValues kind,
                   Kernels& kernels, const Stream& stream);

}  // namespace zeroth
