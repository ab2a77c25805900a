#include <kernels/common/simd_avx2.h>
#include <kernels/topk/topk_cpu.inl>

namespace zeroth::kernels::detail {

void topk_count_avx2(const TopkCountArgs& args) {
  topk_count_any<Avx2>(args);
}
std::int64_t topk_take_avx2(const TopkTakeArgs& args) {
  return topk_take_any<Avx2>(args);
}
std::int64_t topk_collect_avx2(const TopkCollectArgs& args) {
  return topk_collect_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
