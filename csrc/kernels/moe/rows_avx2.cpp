#include <kernels/common/simd_avx2.h>
#include <kernels/moe/rows_cpu.inl>

namespace zeroth::kernels::detail {

void permute_avx2(const PermuteArgs& args) {
  permute_any<Avx2>(args);
}
void unpermute_avx2(const UnpermuteArgs& args) {
  unpermute_any<Avx2>(args);
}
void unpermute_weights_avx2(const UnpermuteArgs& args) {
  unpermute_weights_any<Avx2>(args);
}
void jitter_avx2(const JitterArgs& args) {
  jitter_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
