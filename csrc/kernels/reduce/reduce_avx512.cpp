#include <kernels/common/simd_avx512.h>
#include <kernels/reduce/reduce_cpu.inl>

namespace zeroth::kernels::detail {

void sum_sources_avx512(const SumSourcesArgs& args) {
  sum_sources_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
