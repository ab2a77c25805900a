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
  for (std::int64_t i = 0; i < n; ++i) column[i] = drawn(seed, i);
}
void lowrank_draw_missing_scalar(const LowRankDrawArgs& args) {
  for (int j = 0; j < args.rank; ++j) {
    float* const column = args.columns + j * args.stride;
    bool is_missing = true;
    for (std::int64_t i = 0; i < args.n && is_missing; ++i) is_missing = column[i] == 0.0F;
    if (is_missing) lowrank_draw_scalar(column, args.n, args.seed + static_cast<std::uint32_t>(j));
  }
}

}  // namespace zeroth::kernels::detail
