#include <kernels/bucket/bucket_cpu.inl>
#include <kernels/common/simd_avx2.h>

namespace zeroth::kernels::detail {

std::int64_t bucket_avx2(const BucketArgs& args) {
  return bucket_any<Avx2>(args);
}

void fill_zero_avx2(void* dst, std::int64_t bytes) {
  fill_zero_any<Avx2>(dst, bytes);
}

}  // namespace zeroth::kernels::detail
