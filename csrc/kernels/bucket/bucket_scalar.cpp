#include <kernels/bucket/bucket_cpu.inl>
#include <kernels/common/lane.h>

namespace zeroth::kernels::detail {

std::int64_t bucket_scalar(const BucketArgs& args) {
  return bucket_any<Lane>(args);
}

void fill_zero_scalar(void* dst, std::int64_t bytes) {
  fill_zero_any<Lane>(dst, bytes);
}

}  // namespace zeroth::kernels::detail
