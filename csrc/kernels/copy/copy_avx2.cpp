#include <kernels/common/simd_avx2.h>
#include <kernels/copy/copy_cpu.inl>

namespace zeroth::kernels::detail {

void copy_avx2(void* dst, const void* src, std::int64_t bytes) {
  copy_any<Avx2>(dst, src, bytes);
}

}  // namespace zeroth::kernels::detail
