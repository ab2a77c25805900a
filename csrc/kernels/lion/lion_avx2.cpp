#include <kernels/common/simd_avx2.h>
#include <kernels/lion/lion_cpu.inl>

namespace zeroth::kernels::detail {

void lion_avx2(const LionArgs& args) {
  lion_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
