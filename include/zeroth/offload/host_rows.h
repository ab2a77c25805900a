// Rows of a table in host memory: gathered by number, in float32 or 8 bits, and updated where they were touched.
//
// The arithmetic behind zeroth.HostTable. Functions of arrays that the caller owns; each blocks until it is done, on
// the threads of `pool`, with the same bits for any number of them. Ref: Ma et al., "BiFeat", 2022, for features that
// travel in 8 bits; Min et al., "PyTorch-Direct", 2021, for sparse reads of host memory; Duchi et al., "Adaptive
// Subgradient Methods", JMLR 2011, with one state a row as in DLRM.
#pragma once

#include <zeroth/device/thread_pool.h>

#include <cstdint>
#include <span>
#include <vector>

namespace zeroth {

struct RowShape {
  std::int64_t rows = 0;
  std::int64_t dim = 0;  ///< float32 values of a row
};

/// Throws kUsage for the first index outside of [0, rows): with its value, its position and how many there are.
void require_rows(std::span<const std::int64_t> indices, std::int64_t rows);

/// out[i] = table[indices[i]]. `table` [rows, dim], `out` [indices, dim]. The indices must be good.
void gather_rows(const float* table, RowShape shape, std::span<const std::int64_t> indices, float* out,
                 ThreadPool& pool);

/// Blocks of `block` values, the last of a row may be shorter, each with one scale = max |x| / 127:
///   q = x / scale rounded to the nearest integer, ties to even;  x' = q * scale;  |x' - x| <= scale / 2, up to
///   rounding
/// A block of zeros has scale 0. One that has a value that is not finite has scale NaN, and comes back as NaN.
/// Bytes of a row: dim + 4 * blocks, where float32 has 4 * dim.
[[nodiscard]] std::int64_t blocks_of_row(std::int64_t dim, std::int64_t block);

/// The rows of `indices`, quantized: `values` [indices, dim], `scales` [indices, blocks_of_row()].
void gather_rows_in_8_bits(const float* table, RowShape shape, std::span<const std::int64_t> indices,
                           std::int64_t block, std::int8_t* values, float* scales, ThreadPool& pool);

/// Rows with a gradient, ascending and each once.
struct TouchedRows {
  std::vector<std::int64_t> rows{};
  std::vector<float> sums{};  ///< [rows, dim]
};

/// Sums of the gradients of equal indices, in the order of their positions, times `factor`. `grads` [indices, dim].
[[nodiscard]] TouchedRows sum_touched_rows(std::span<const std::int64_t> indices, const float* grads, std::int64_t dim,
                                           float factor, ThreadPool& pool);

struct RowHyper {
  float lr = 0.01F;
  float beta1 = 0.9F;
  float beta2 = 0.999F;
  float eps = 1e-8F;
  std::int64_t step = 1;  ///< number of this update of the table, from 1
};

/// p -= lr * g, of the touched rows.
void update_rows_sgd(float* table, RowShape shape, const TouchedRows& touched, const RowHyper& hyper, ThreadPool& pool);
/// One state a row, `sums` [rows]: s += mean(g * g); p -= lr * g / (sqrt(s) + eps).
void update_rows_adagrad(float* table, float* sums, RowShape shape, const TouchedRows& touched, const RowHyper& hyper,
                         ThreadPool& pool);
/// Adam on the touched rows alone, as torch.optim.SparseAdam: others keep value and moments. `first` and `second`
/// [rows, dim].
void update_rows_adam(float* table, float* first, float* second, RowShape shape, const TouchedRows& touched,
                      const RowHyper& hyper, ThreadPool& pool);

}  // namespace zeroth
