#include <kernels/adamw/adamw_cpu.inl>
#include <kernels/common/simd_avx2.h>

namespace zeroth::kernels::detail {

void adamw_avx2(const AdamWArgs& args) {
  adamw_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
