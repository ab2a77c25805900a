#include <kernels/common/simd_avx512.h>
#include <kernels/lion/lion_cpu.inl>

namespace zeroth::kernels::detail {

void lion_avx512(const LionArgs& args) {
  lion_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
