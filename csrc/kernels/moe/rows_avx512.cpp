#include <kernels/common/simd_avx512.h>
#include <kernels/moe/rows_cpu.inl>

namespace zeroth::kernels::detail {

void permute_avx512(const PermuteArgs& args) {
  permute_any<Avx512>(args);
}
void unpermute_avx512(const UnpermuteArgs& args) {
  unpermute_any<Avx512>(args);
}
void unpermute_weights_avx512(const UnpermuteArgs& args) {
  unpermute_weights_any<Avx512>(args);
}
void jitter_avx512(const JitterArgs& args) {
  jitter_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
