#include <kernels/common/simd_avx2.h>
#include <kernels/signs/signs_cpu.inl>

namespace zeroth::kernels::detail {

void sign_message_avx2(const SignMessageArgs& args) {
  sign_message_any<Avx2>(args);
}
void sign_pack_avx2(const SignPackArgs& args) {
  sign_pack_any<Avx2>(args);
}
void sign_sum_avx2(const SignSumArgs& args) {
  sign_sum_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
