#include <kernels/common/simd_avx2.h>
#include <kernels/sgd/sgd_cpu.inl>

namespace zeroth::kernels::detail {

void sgd_avx2(const SgdArgs& args) {
  sgd_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
