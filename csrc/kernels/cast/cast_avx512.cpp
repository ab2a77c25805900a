#include <kernels/cast/cast_cpu.inl>
#include <kernels/common/simd_avx512.h>

namespace zeroth::kernels::detail {

void cast_avx512(const CastArgs& args) {
  cast_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
