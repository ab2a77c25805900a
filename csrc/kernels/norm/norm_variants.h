// The compiled variants of step 1 of norm.h: the sums of squares of blocks.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels::detail {

/// sums: [ceil(n / 1024)].
void norm_blocks_scalar(const void* src, DType dtype, std::int64_t n, double* sums);
void norm_blocks_avx2(const void* src, DType dtype, std::int64_t n, double* sums);
void norm_blocks_avx512(const void* src, DType dtype, std::int64_t n, double* sums);

}  // namespace zeroth::kernels::detail
