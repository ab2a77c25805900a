// The exact sum of squares of a set of numbers that is spread over ranks: no split, group or order of ranks
// can change one bit.
//
// Two steps, each of them deterministic:
// 1. Every block of 1,024 consecutive elements gives one double. Lane l (0..31) takes the elements l, l + 32,
// l + 64, ... in this order:
//    a_l = fma(x, x, a_l), x widened to double; then a_l += a_(l+16) for l < 16, a_l += a_(l+8) for l < 8,
//    and so on with 4, 2, 1; the result is a_0. Missing elements at the end of the last block count as zeros.
//    Relative error of a block: at most 37 * 2^-53.
// 2. The doubles are added without any rounding in a fixed-point number that covers the whole range of finite
// doubles, 2^-1074 to 2^1024
//    (Kulisch, Miranker: The arithmetic of the digital computer, SIAM Review 28, 1986). It is stored as int64
//    limbs of 32 payload bits; integer addition of limbs adds numbers, so ranks combine theirs by an
//    all_reduce(SUM) of int64 words.
// What makes the sum independent of the sharding is that shard boundaries lie at multiples of a block in unit
// coordinates.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <array>
#include <cstdint>
#include <span>

namespace zeroth::kernels {

/// Elements of one block. Ranges passed to NormAccumulator::add start at a multiple of this in unit
/// coordinates.
inline constexpr std::int64_t kNormBlock = 1024;

/// A value; copies are 560 bytes. Not thread safe; threads fill one each and merge.
class NormAccumulator {
 public:
  static constexpr int kLimbs = 68;
  /// Limbs, then the number of blocks that were not finite, then the number of blocks added.
  static constexpr int kWords = kLimbs + 2;

  /// Adds the squares of n elements (fp32, bf16 or fp64; any alignment of the type), on the calling thread.
  /// Only the last range of a unit may have an n that is no multiple of kNormBlock. A block with an infinite
  /// or NaN element, or (fp64 only) with a sum of squares beyond the range of double, is counted and adds
  /// nothing. Throws Error{kUsage}: dtype not floating, n < 0, unsupported isa.
  void add(const void* src, DType dtype, std::int64_t n, Isa isa);

  /// Adds sums of blocks that step 1 made elsewhere (zeroth_cuda_norm_blocks), as add() would have. One that is
  /// infinite or NaN is counted and adds nothing.
  void add_blocks(std::span<const double> sums) noexcept;

  /// Adds all that `other` holds.
  void merge(const NormAccumulator& other) noexcept;

  /// The words for all_reduce(SUM) in place. Together the ranks may add 2^31 blocks or 2^31 accumulators.
  [[nodiscard]] std::span<std::int64_t, kWords> words() noexcept { return words_; }
  [[nodiscard]] std::span<const std::int64_t, kWords> words() const noexcept { return words_; }

  [[nodiscard]] std::int64_t nonfinite_blocks() const noexcept { return words_[kLimbs]; }
  [[nodiscard]] std::int64_t num_blocks() const noexcept { return words_[kLimbs + 1]; }

  /// The sum, correctly rounded to nearest even; infinity if any block was not finite or the sum is beyond
  /// the range of double. Relative error against the true sum of squares: at most 38 * 2^-53 (fp64 elements
  /// below 1e-154 besides lose what underflows).
  [[nodiscard]] double sum_of_squares() const noexcept;

  /// sqrt(sum_of_squares()), rounded once more.
  [[nodiscard]] double l2_norm() const noexcept;

  /// Equal numbers, whatever the order in which they were added.
  friend bool operator==(const NormAccumulator& a, const NormAccumulator& b) noexcept {
    return a.carried().words_ == b.carried().words_;
  }

 private:
  void add_block(double sum) noexcept;
  /// Brings every limb but the last into [0, 2^32); the number stays the same.
  void carry() noexcept;
  [[nodiscard]] NormAccumulator carried() const noexcept;

  std::array<std::int64_t, kWords> words_{};
};

}  // namespace zeroth::kernels
