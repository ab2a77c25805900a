// Rows of a table by number: out[i] = table[indices[i]]. On a device the table may lie in page-locked memory of the
// host, which the device then reads itself, the touched rows alone. Ref: Min et al., "PyTorch-Direct", 2021.
#pragma once

#include <cstdint>

namespace zeroth::kernels {

struct GatherRowsArgs {
  const float* table = nullptr;           ///< [rows, dim]
  std::int64_t rows = 0;                  ///< >= 0
  std::int64_t dim = 0;                   ///< values of a row, >= 1
  const std::int64_t* indices = nullptr;  ///< [n]; a row of an index outside of [0, rows) is NaN
  float* out = nullptr;                   ///< [n, dim]; overlaps nothing
  std::int64_t n = 0;
};

}  // namespace zeroth::kernels
