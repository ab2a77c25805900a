#include <kernels/common/simd_avx2.h>
#include <kernels/reduce/reduce_cpu.inl>

namespace zeroth::kernels::detail {

void sum_sources_avx2(const SumSourcesArgs& args) {
  sum_sources_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
