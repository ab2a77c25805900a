#include <kernels/moe/moe_avx2.h>
// The vectors come before the loops that use them.
#include <kernels/moe/gate_cpu.inl>

namespace zeroth::kernels::detail {

void gate_avx2(const GateArgs& args) {
  gate_any<Avx2>(args);
}
std::int64_t gate_backward_avx2(const GateBackwardArgs& args) {
  return gate_backward_any<Avx2>(args);
}

}  // namespace zeroth::kernels::detail
