// The exact sum of squares of numbers that are spread over ranks. Its bits do not depend on the split, the groups or
// the order of ranks.
//
// Two deterministic steps:
// 1. Every block of 1,024 consecutive elements gives one double. Lane l (0..31) takes the elements l, l + 32, l + 64,
// ...
//    in this order: a_l = fma(x, x, a_l), with x widened to double. Then a_l += a_(l+16) for l < 16, a_l += a_(l+8) for
//    l < 8, and so on with 4, 2, 1. The result is a_0. Missing elements at the end of the last block count as zeros.
//    Relative error of a block: at most 37 * 2^-53.
// 2. The doubles are added without rounding in a fixed-point number that covers the whole range of finite doubles,
// 2^-1074
//    to 2^1024 (Kulisch, Miranker: The arithmetic of the digital computer, SIAM Review 28, 1986). It is stored as int64
//    limbs of 32 payload bits. Adding limbs as integers adds the numbers, so ranks combine theirs by an all_reduce(SUM)
//    of int64 words.
// The sum does not depend on the sharding, because shard boundaries lie at multiples of a block in unit coordinates.
#pragma once

#include <kernels/common/dispatch.h>
#include <zeroth/base/dtype.h>

#include <array>
#include <cstdint>
#include <span>

namespace zeroth::kernels {

/// Elements of one block. Ranges for NormAccumulator::add start at a multiple of this in unit coordinates.
inline constexpr std::int64_t kNormBlock = 1024;

/// A value of 560 bytes. Not thread safe: each thread fills its own, and they are merged.
class NormAccumulator {
 public:
  static constexpr int kLimbs = 68;
  /// Words: limbs, then the number of non-finite blocks, then the number of added blocks.
  static constexpr int kWords = kLimbs + 2;

  /// Adds the squares of n elements (fp32, bf16 or fp64, with the alignment of the type), on the calling thread. n must
  /// be a multiple of kNormBlock, except for the last range of a unit. A block with an infinite or NaN element, or
  /// (fp64 only) with a sum of squares beyond the range of double, is counted as non-finite and adds nothing. Throws
  /// Error{kUsage} for a dtype that is not floating, n < 0, or an unsupported isa.
  void add(const void* src, DType dtype, std::int64_t n, Isa isa);

  /// Adds sums of blocks from step 1 on a device (zeroth_cuda_norm_blocks), with the result of add(). An infinite or
  /// NaN sum is counted as non-finite and adds nothing.
  void add_blocks(std::span<const double> sums) noexcept;

  /// Adds the content of `other`.
  void merge(const NormAccumulator& other) noexcept;

  /// The words for all_reduce(SUM) in place. Together the ranks may add 2^31 blocks or 2^31 accumulators.
  [[nodiscard]] std::span<std::int64_t, kWords> words() noexcept { return words_; }
  [[nodiscard]] std::span<const std::int64_t, kWords> words() const noexcept { return words_; }

  [[nodiscard]] std::int64_t nonfinite_blocks() const noexcept { return words_[kLimbs]; }
  [[nodiscard]] std::int64_t num_blocks() const noexcept { return words_[kLimbs + 1]; }

  /// The sum, correctly rounded to nearest even; infinity if any block was not finite or the sum is beyond the range of
  /// double. Relative error to the true sum of squares: at most 38 * 2^-53 (squares of fp64 elements below 1e-154 may
  /// also underflow).
  [[nodiscard]] double sum_of_squares() const noexcept;

  /// sqrt(sum_of_squares()), rounded once more.
  [[nodiscard]] double l2_norm() const noexcept;

  /// True for equal numbers, for any order of their addition.
  friend bool operator==(const NormAccumulator& a, const NormAccumulator& b) noexcept {
    return a.carried().words_ == b.carried().words_;
  }

 private:
  void add_block(double sum) noexcept;
  /// Normalises every limb but the last to [0, 2^32); the number does not change.
  void carry() noexcept;
  [[nodiscard]] NormAccumulator carried() const noexcept;

  std::array<std::int64_t, kWords> words_{};
};

}  // namespace zeroth::kernels
