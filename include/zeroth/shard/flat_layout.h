// FlatLayout: where each parameter of a unit lies in one flat buffer, and where ranks' shards begin. A pure value.
//
//   offset 0                                                             length (whole 64 bytes)
//   | w1 ........ | pad | b1 . | pad | w2 ................ | tail padding |
//   |<- rank 0: blocks 0..3 ->|<- rank 1: blocks 4..7 ->|<- rank 2: 8..10 ->|
//
// Offsets never depend on the world size; shard boundaries are multiples of the norm's block or the end, whose block
// may be short, and nobody computes total/shards. Which rank has which piece depends on the degrees of sharding
// (degrees.h).
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/shard/param_spec.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Elements in a block: the grain of shard boundaries and of the exact norm.
inline constexpr std::int64_t kBlockElements = 1024;

/// Half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// A parameter's place in a flat buffer, in elements.
struct Segment {
  int param = -1;
  std::int64_t offset = 0;  ///< multiple of 64 bytes in the parameter's dtype
  std::int64_t numel = 0;
  [[nodiscard]] Range range() const { return {offset, offset + numel}; }
  bool operator==(const Segment&) const = default;
};

/// Parameters of one unit with one dtype, one trainability and one gradient factor; those of 16 bits are matrices or
/// vectors.
struct FlatLayout {
  int unit = 0;
  DType dtype = DType::kFloat32;
  bool vectors =
      false;  ///< 16-bit parameters with fewer than two dimensions, whose gradients may come wide (decision 0012)
  bool trainable = true;
  double grad_factor = 1.0;  ///< a block of the norm must not mix factors
  std::int64_t length = 0;   ///< elements, padded to kSegmentAlignBytes; padding is zero
  std::vector<Segment> segments{};
  std::vector<std::int64_t> boundaries{};  ///< world + 1 entries: piece i is [boundaries[i], boundaries[i + 1])
  std::vector<int> pieces{};               ///< of each rank, see pieces_of_ranks()

  [[nodiscard]] int world() const { return static_cast<int>(boundaries.size()) - 1; }
  /// The piece of a rank: its part at the degree of the world.
  [[nodiscard]] Range shard(int rank) const { return part(rank, world()); }
  /// What a rank has of a state that is split over `degree` ranks, one of the degrees that the pieces were made for.
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

/// Pieces of whole blocks, numbers of blocks equal but for one; the last block may be short. The odd blocks go to
/// consecutive ranks, so that parts of every degree differ by a block at most too; `rotate` turns which ranks these
/// are, so that many small units spread over all ranks. `length` must not be negative. `pieces`: of each rank.
[[nodiscard]] std::vector<std::int64_t> shard_boundaries(std::int64_t length, std::span<const int> pieces, int rotate);

/// Layouts of one unit: one per (dtype, trainable, grad_factor), two for a 16-bit dtype with matrices and vectors, in
/// order of first appearance. `unit.params` must index `params`. Throws kModel on a shape that cannot be (negative,
/// more than 2^48 elements in a unit), a dtype that is not floating, or a gradient factor that is not finite.
/// `degrees`: see pieces_of_ranks().
[[nodiscard]] std::vector<FlatLayout> make_flat_layouts(std::span<const ParamSpec> params, const UnitSpec& unit,
                                                        int unit_index, int world, std::span<const int> degrees = {});

/// What two ranges share (empty if they do not meet).
[[nodiscard]] Range intersect(const Range& one, const Range& other);

}  // namespace zeroth
