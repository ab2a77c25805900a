#include <kernels/common/simd_avx512.h>
#include <kernels/lowrank/lowrank_cpu.inl>

namespace zeroth::kernels::detail {

void lowrank_product_avx512(const LowRankProductArgs& args) {
  product_any<Avx512>(args);
}
void lowrank_transposed_avx512(const LowRankProductArgs& args) {
  transposed_any<Avx512>(args);
}
void lowrank_restore_avx512(const LowRankRestoreArgs& args) {
  restore_any<Avx512>(args);
}
int lowrank_orthonormalize_avx512(const OrthonormalizeArgs& args) {
  return orthonormalize_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
