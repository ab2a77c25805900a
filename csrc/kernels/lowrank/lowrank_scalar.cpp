#include <kernels/lowrank/lowrank_cpu.inl>

namespace zeroth::kernels::detail {

void lowrank_product_scalar(const LowRankProductArgs& args) {
  product_any<Lane>(args);
}
void lowrank_transposed_scalar(const LowRankProductArgs& args) {
  transposed_any<Lane>(args);
}
void lowrank_restore_scalar(const LowRankRestoreArgs& args) {
  restore_any<Lane>(args);
}
int lowrank_orthonormalize_scalar(const OrthonormalizeArgs& args) {
  return orthonormalize_any<Lane>(args);
}
void lowrank_draw_scalar(float* column, std::int64_t n, std::uint32_t seed) {
  for (std::int64_t i = 0; i < n; ++i) column[i] = 2.0F * uniform_of(seed, static_cast<std::uint32_t>(i)) - 1.0F;
}

}  // namespace zeroth::kernels::detail
