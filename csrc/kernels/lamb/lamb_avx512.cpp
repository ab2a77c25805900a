#include <kernels/common/simd_avx512.h>
#include <kernels/lamb/lamb_cpu.inl>

namespace zeroth::kernels::detail {

void lamb_measure_avx512(const LambArgs& args) {
  lamb_measure_any<Avx512>(args);
}

void lamb_apply_avx512(const LambArgs& args) {
  lamb_apply_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
