#include <kernels/cast/cast_cpu.inl>
#include <kernels/common/simd_avx2.h>

namespace zeroth::kernels::detail {

void cast_avx2(const CastArgs& args) {
  cast_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
