#include <kernels/moe/rows_cpu.inl>

namespace zeroth::kernels::detail {

void permute_scalar(const PermuteArgs& args) {
  permute_any<Lane>(args);
}
void unpermute_scalar(const UnpermuteArgs& args) {
  unpermute_any<Lane>(args);
}
void unpermute_weights_scalar(const UnpermuteArgs& args) {
  unpermute_weights_any<Lane>(args);
}
void jitter_scalar(const JitterArgs& args) {
  jitter_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
