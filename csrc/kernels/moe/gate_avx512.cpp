#include <kernels/moe/moe_avx512.h>
// The vectors come before the loops that use them.
#include <kernels/moe/gate_cpu.inl>

namespace zeroth::kernels::detail {

void gate_avx512(const GateArgs& args) {
  gate_any<Avx512>(args);
}
std::int64_t gate_backward_avx512(const GateBackwardArgs& args) {
  return gate_backward_any<Avx512>(args);
}

}  // namespace zeroth::kernels::detail
