// FlatLayout: the offsets of a unit's parameters in one flat buffer, and the boundaries of the ranks' shards. A value.
//
//   offset 0                                                             length (whole 64 bytes)
//   | w1 ........ | pad | b1 . | pad | w2 ................ | tail padding |
//   |<- rank 0: blocks 0..3 ->|<- rank 1: blocks 4..7 ->|<- rank 2: 8..10 ->|
//
// Offsets do not depend on the world size. A shard boundary is a multiple of the norm's block or the end of the flat;
// the last block may be short. The degrees of sharding decide which rank has which piece (degrees.h).
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/shard/param_spec.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Elements in a block, the unit of shard boundaries and of the exact norm.
inline constexpr std::int64_t kBlockElements = 1024;

/// Half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// The range of one parameter in a flat buffer, in elements.
struct Segment {
  int param = -1;
  std::int64_t offset = 0;  ///< multiple of 64 bytes in the parameter's dtype
  std::int64_t numel = 0;
  [[nodiscard]] Range range() const { return {offset, offset + numel}; }
  bool operator==(const Segment&) const = default;
};

/// Parameters of one unit with one dtype, one trainability and one gradient factor. 16-bit parameters, and those that
/// are ParamSpec::separate, have one flat for matrices and one for vectors.
struct FlatLayout {
  int unit = 0;
  DType dtype = DType::kFloat32;
  bool vectors =
      false;  ///< parameters with fewer than two dimensions; gradients of 16-bit ones may come wide (decision 0012)
  bool trainable = true;
  double grad_factor = 1.0;  ///< a block of the norm must not mix factors
  std::int64_t length = 0;   ///< elements, padded to kSegmentAlignBytes; padding is zero
  std::vector<Segment> segments{};
  std::vector<std::int64_t> boundaries{};  ///< world + 1 entries: piece i is [boundaries[i], boundaries[i + 1])
  std::vector<int> pieces{};               ///< of each rank, see pieces_of_ranks()

  [[nodiscard]] int world() const { return static_cast<int>(boundaries.size()) - 1; }
  /// The piece of a rank: its part at degree world().
  [[nodiscard]] Range shard(int rank) const { return part(rank, world()); }
  /// The part of a rank in a state of this degree, which must be one of the degrees that the pieces were made for.
  [[nodiscard]] Range part(int rank, int degree) const {
    const int run = world() / degree;
    const int first = pieces[static_cast<std::size_t>(rank)] / run * run;
    return {boundaries[static_cast<std::size_t>(first)], boundaries[static_cast<std::size_t>(first + run)]};
  }
  [[nodiscard]] std::vector<std::int64_t> counts() const;
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(length) * size_of(dtype); }
  /// Type of gradients, masters and sums: fp32 for bf16.
  [[nodiscard]] DType accumulation() const { return accumulation_dtype(dtype); }
  [[nodiscard]] std::size_t accumulation_bytes() const {
    return static_cast<std::size_t>(length) * size_of(accumulation());
  }
  bool operator==(const FlatLayout&) const = default;
};

/// Boundaries of pieces of whole blocks; the last block may be short. The numbers of blocks differ by at most one. The
/// extra blocks go to consecutive ranks, so the parts of every degree also differ by at most one block. `rotate` shifts
/// these ranks, so that many small units spread over all ranks. `length`: elements, not negative. `pieces`: the piece
/// of each rank.
[[nodiscard]] std::vector<std::int64_t> shard_boundaries(std::int64_t length, std::span<const int> pieces, int rotate);

/// Layouts of one unit in order of first appearance: one per (dtype, trainable, grad_factor), and two where vectors are
/// apart from matrices. `unit.params` must index `params`. `degrees`: see pieces_of_ranks(). Throws kModel
/// for an impossible shape (negative, more than 2^48 elements in a unit), a dtype that is not floating, or a gradient
/// factor that is not finite.
[[nodiscard]] std::vector<FlatLayout> make_flat_layouts(std::span<const ParamSpec> params, const UnitSpec& unit,
                                                        int unit_index, int world, std::span<const int> degrees = {});

/// The intersection of two ranges; empty if they do not meet.
[[nodiscard]] Range intersect(const Range& one, const Range& other);

}  // namespace zeroth
