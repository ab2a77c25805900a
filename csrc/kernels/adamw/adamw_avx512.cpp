#include <kernels/adamw/adamw_cpu.inl>
#include <kernels/common/simd_avx512.h>

namespace zeroth::kernels::detail {

void adamw_avx512(const AdamWArgs& args) {
  adamw_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
