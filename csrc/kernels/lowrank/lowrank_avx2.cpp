#include <kernels/common/simd_avx2.h>
#include <kernels/lowrank/lowrank_cpu.inl>

namespace zeroth::kernels::detail {

void lowrank_product_avx2(const LowRankProductArgs& args) {
  product_any<Avx2>(args);
}
void lowrank_transposed_avx2(const LowRankProductArgs& args) {
  transposed_any<Avx2>(args);
}
void lowrank_restore_avx2(const LowRankRestoreArgs& args) {
  restore_any<Avx2>(args);
}
int lowrank_orthonormalize_avx2(const OrthonormalizeArgs& args) {
  return orthonormalize_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
