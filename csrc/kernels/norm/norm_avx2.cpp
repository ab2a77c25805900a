#include <kernels/common/simd_avx2.h>
#include <kernels/norm/norm_cpu.inl>

namespace zeroth::kernels::detail {

void norm_blocks_avx2(const void* src, DType dtype, std::int64_t n, double* sums) {
  norm_blocks_any<Avx2>(src, dtype, n, sums);
}

}  // namespace zeroth::kernels::detail
