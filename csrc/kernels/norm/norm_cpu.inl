// Memory access of the block sums; included once per instruction set.
#include <kernels/norm/norm.h>
#include <kernels/norm/norm_math.h>
#include <kernels/norm/norm_variants.h>

namespace zeroth::kernels {
namespace {

template <class D, class In>
void norm_blocks_range(const In* src, std::int64_t n, double* sums) {
  std::int64_t i = 0;
  for (; i + kNormBlock <= n; i += kNormBlock) {
    *sums++ = norm_block<D>(src + i);
  }
  if (i < n) {
    alignas(64) unsigned char padded[kNormBlock * sizeof(In)] = {};
    __builtin_memcpy(padded, src + i, static_cast<std::size_t>(n - i) * sizeof(In));
    *sums = norm_block<D>(reinterpret_cast<const In*>(padded));
  }
}

template <template <class> class V>
void norm_blocks_any(const void* src, DType dtype, std::int64_t n, double* sums) {
  using D = V<double>;
  switch (dtype) {
    case DType::kFloat64:
      return norm_blocks_range<D>(static_cast<const double*>(src), n, sums);
    case DType::kBFloat16:
      return norm_blocks_range<D>(static_cast<const BFloat16*>(src), n, sums);
    default:
      return norm_blocks_range<D>(static_cast<const float*>(src), n, sums);
  }
}

}  // namespace
}  // namespace zeroth::kernels
