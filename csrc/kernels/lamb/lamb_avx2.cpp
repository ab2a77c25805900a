#include <kernels/common/simd_avx2.h>
#include <kernels/lamb/lamb_cpu.inl>

namespace zeroth::kernels::detail {

void lamb_measure_avx2(const LambArgs& args) {
  lamb_measure_any<Avx2>(args);
}

void lamb_apply_avx2(const LambArgs& args) {
  lamb_apply_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
