// A matrix as the product of two thin ones, and the error that it leaves.
//
//   message   M = source [+ error], rows x columns
//   P         M Q, rows x rank; summed over ranks, then made orthonormal
//   Q         M^T P, columns x rank; summed over ranks
//   result    P Q^T
//   error     M - P Q^T
//
// Q is kept from step to step: one step of a power iteration each time. Ref: Vogels, Karimireddy, Jaggi, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, algorithm 1.
//
// P and Q lie column by column: P[j] is `rows` neighbouring floats, Q[j] `columns` of them. Orders of sums, the same at
// every width:
//
// - an element of P: lane l (0 .. 15) takes the columns l, l + 16, ... in this order: a_l = fma(M, Q, a_l). Missing
//   columns are zeros. Then a_l += a_(l + 8) for l < 8, and so on with 4, 2, 1; the result is a_0.
// - an element of Q: the rows in their order, a = fma(M, P, a).
// - an element of P Q^T: P[0] Q[0], then a = fma(P[j], Q[j], a) with j = 1, 2, ...
// - products of two columns of P in double, with the lanes of an element of P; the rest of orthonormalize() in double,
//   rounded once to float for each column that is subtracted and for the division.
//
// NaN results are the positive quiet NaN. All run on the calling thread. The bits do not depend on the split: product()
// of rows, transposed_product() of columns, restore() of both; nor on `isa`. All throw Error{kUsage} for negative
// counts, a rank outside 1 .. 64, a stride below the columns, or an unsupported isa.
#pragma once

#include <kernels/common/dispatch.h>

#include <cstdint>

namespace zeroth::kernels {

inline constexpr int kMostRank = 64;

/// A part of a matrix in memory, row by row.
struct LowRankShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;  ///< elements from a row to the next
  int rank = 1;
};

struct LowRankProductArgs {
  LowRankShape shape{};
  const float* matrix = nullptr;   ///< M
  const float* factor = nullptr;   ///< product(): Q; transposed_product(): P
  std::int64_t factor_stride = 0;  ///< elements from a column of the factor to the next
  float* result = nullptr;         ///< product(): P; transposed_product(): Q
  std::int64_t result_stride = 0;
};
/// P = M Q.
void lowrank_product(const LowRankProductArgs& args, Isa isa);
/// Q = M^T P.
void lowrank_transposed_product(const LowRankProductArgs& args, Isa isa);

struct LowRankRestoreArgs {
  LowRankShape shape{};
  const float* p = nullptr;
  std::int64_t p_stride = 0;
  const float* q = nullptr;
  std::int64_t q_stride = 0;
  float* result = nullptr;  ///< P Q^T, with the stride of the shape; or null
  float* error = nullptr;   ///< M in, M - P Q^T out, with that stride; or null
};
/// The product, and what the message has beyond it.
void lowrank_restore(const LowRankRestoreArgs& args, Isa isa);

struct OrthonormalizeArgs {
  float* columns = nullptr;  ///< [rank][stride]
  std::int64_t rows = 0;
  std::int64_t stride = 0;
  int rank = 1;
};
/// Modified Gram-Schmidt. A column of which less than 2^-20 of its own length is left, or whose length is not a normal
/// number, becomes zeros: it was in the span of those before it. Returns the number of such columns. One that is
/// infinite or NaN makes itself and later ones NaN.
int lowrank_orthonormalize(const OrthonormalizeArgs& args, Isa isa);

/// Fills a column with numbers from -1 to 1, from a hash of the seed and the index: a first Q, or one anew where a
/// column became zeros.
void lowrank_draw(float* column, std::int64_t n, std::uint32_t seed);

struct LowRankDrawArgs {
  float* columns = nullptr;  ///< [rank][stride]
  std::int64_t n = 0;        ///< elements of a column
  std::int64_t stride = 0;
  int rank = 1;
  std::uint32_t seed = 0;  ///< of the first column; each further has the next
};
/// lowrank_draw() of those columns that are zeros.
void lowrank_draw_missing(const LowRankDrawArgs& args);

}  // namespace zeroth::kernels
