#include <kernels/common/simd_avx512.h>
#include <kernels/signs/signs_cpu.inl>

namespace zeroth::kernels::detail {

void sign_message_avx512(const SignMessageArgs& args) {
  sign_message_any<Avx512>(args);
}
void sign_pack_avx512(const SignPackArgs& args) {
  sign_pack_any<Avx512>(args);
}
void sign_sum_avx512(const SignSumArgs& args) {
  sign_sum_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
