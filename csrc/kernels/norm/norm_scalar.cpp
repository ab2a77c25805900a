#include <kernels/common/lane.h>
#include <kernels/norm/norm_cpu.inl>

namespace zeroth::kernels::detail {

void norm_blocks_scalar(const void* src, DType dtype, std::int64_t n, double* sums) {
  norm_blocks_any<Lane>(src, dtype, n, sums);
}

}  // namespace zeroth::kernels::detail
