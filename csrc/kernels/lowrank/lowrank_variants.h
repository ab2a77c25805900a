// The compiled variants behind lowrank.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/lowrank/lowrank.h>

namespace zeroth::kernels::detail {

void lowrank_product_scalar(const LowRankProductArgs& args);
void lowrank_product_avx2(const LowRankProductArgs& args);
void lowrank_product_avx512(const LowRankProductArgs& args);
void lowrank_transposed_scalar(const LowRankProductArgs& args);
void lowrank_transposed_avx2(const LowRankProductArgs& args);
void lowrank_transposed_avx512(const LowRankProductArgs& args);
void lowrank_restore_scalar(const LowRankRestoreArgs& args);
void lowrank_restore_avx2(const LowRankRestoreArgs& args);
void lowrank_restore_avx512(const LowRankRestoreArgs& args);
int lowrank_orthonormalize_scalar(const OrthonormalizeArgs& args);
int lowrank_orthonormalize_avx2(const OrthonormalizeArgs& args);
int lowrank_orthonormalize_avx512(const OrthonormalizeArgs& args);
/// One for all.
void lowrank_draw_scalar(float* column, std::int64_t n, std::uint32_t seed);
void lowrank_draw_missing_scalar(const LowRankDrawArgs& args);

}  // namespace zeroth::kernels::detail
