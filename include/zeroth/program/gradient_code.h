// Gradient coding: the exact sum of n partial gradients from any n - s of n workers.
//
// The batch has n chunks, with gradients g_0 .. g_(n-1). Worker i computes those of its s + 1 chunks and sends one
// combination, b_i = sum_c B[i][c] g_c. For every set of n - s workers there are coefficients a with
//
//   sum over these workers of a_i b_i = sum over all chunks of g_c
//
// - Fractional repetition, where n is a multiple of s + 1: workers are in groups of s + 1, all of a group have the same
//   s + 1 chunks with coefficients 1. Any worker of each group is enough, with coefficients 1: nothing is rounded but
//   the sums.
// - Cyclic repetition otherwise: worker i has the chunks i .. i + s (mod n). Rows of B are in the null space of a drawn
//   s x n matrix whose rows sum to zero, so any n - s of them span the ones. Coefficients are solved in double.
//
// What s stragglers cost is s + 1 times the computation. Pure values: nothing is sent here.
// Ref: Tandon, Lei, Dimakis, Karampatziakis, "Gradient Coding: Avoiding Stragglers in Distributed Learning", ICML 2017,
// algorithms 1 and 2.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zeroth {

struct CodedChunk {
  int chunk = 0;
  double coefficient = 1.0;

  friend bool operator==(const CodedChunk&, const CodedChunk&) = default;
};

struct GradientCode {
  int workers = 0;                              ///< n; as many chunks
  int stragglers = 0;                           ///< s
  std::vector<std::vector<CodedChunk>> rows{};  ///< of each worker, its s + 1 chunks, ascending

  [[nodiscard]] bool is_fractional() const { return workers % (stragglers + 1) == 0; }
  friend bool operator==(const GradientCode&, const GradientCode&) = default;
};

/// The same seed gives the same code. Throws kUsage unless 0 <= s < n.
[[nodiscard]] GradientCode gradient_code(int workers, int stragglers, std::uint64_t seed = 1);

/// One coefficient for each of `survivors`: different workers, in any order. Throws kUsage for a worker that is none or
/// is there twice, and where the survivors do not determine the sum; n - s of them always do. Fewer may be enough for
/// fractional repetition.
[[nodiscard]] std::vector<double> decode_coefficients(const GradientCode& code, std::span<const int> survivors);

}  // namespace zeroth
