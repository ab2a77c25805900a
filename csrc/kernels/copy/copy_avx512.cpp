#include <kernels/common/simd_avx512.h>
#include <kernels/copy/copy_cpu.inl>

namespace zeroth::kernels::detail {

void copy_avx512(void* dst, const void* src, std::int64_t bytes) {
  copy_any<Avx512>(dst, src, bytes);
}

}  // namespace zeroth::kernels::detail
