#include <kernels/moe/gate_cpu.inl>

namespace zeroth::kernels::detail {

void gate_scalar(const GateArgs& args) {
  gate_any<Lane>(args);
}
std::int64_t gate_backward_scalar(const GateBackwardArgs& args) {
  return gate_backward_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
