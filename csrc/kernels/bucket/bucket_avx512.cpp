#include <kernels/bucket/bucket_cpu.inl>
#include <kernels/common/simd_avx512.h>

namespace zeroth::kernels::detail {

std::int64_t bucket_avx512(const BucketArgs& args) {
  return bucket_any<Avx512>(args);
}

void fill_zero_avx512(void* dst, std::int64_t bytes) {
  fill_zero_any<Avx512>(dst, bytes);
}

}  // namespace zeroth::kernels::detail
