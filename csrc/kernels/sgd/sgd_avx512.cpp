#include <kernels/common/simd_avx512.h>
#include <kernels/sgd/sgd_cpu.inl>

namespace zeroth::kernels::detail {

void sgd_avx512(const SgdArgs& args) {
  sgd_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
