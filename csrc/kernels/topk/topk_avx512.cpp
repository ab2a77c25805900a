#include <kernels/common/simd_avx512.h>
#include <kernels/topk/topk_cpu.inl>

namespace zeroth::kernels::detail {

void topk_count_avx512(const TopkCountArgs& args) {
  topk_count_any<Avx512>(args);
}
std::int64_t topk_take_avx512(const TopkTakeArgs& args) {
  return topk_take_any<Avx512>(args);
}
std::int64_t topk_collect_avx512(const TopkCollectArgs& args) {
  return topk_collect_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
