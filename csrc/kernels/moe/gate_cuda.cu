#include <kernels/common/launch_cuda.h>
#include <kernels/moe/gate_grid.h>
#include <kernels/moe/moe_cuda.h>

extern "C" std::size_t zeroth_cuda_moe_gate_workspace(const zeroth::kernels::GateRule* rule, zeroth::DType dtype,
                                                      std::int64_t tokens) {
  const bool good =
      rule != nullptr && tokens >= 0 && zeroth::kernels::is_gate_rule(*rule) && zeroth::kernels::has_gate(dtype);
  return good ? zeroth::kernels::gate_workspace(*rule, dtype, tokens) : 0;
}

extern "C" int zeroth_cuda_moe_gate(const zeroth::kernels::GateArgs* args, void* workspace, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::gate_on_grid(*args, workspace, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_moe_gate_backward(const zeroth::kernels::GateBackwardArgs* args, void* workspace,
                                             void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::gate_backward_on_grid(*args, workspace, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
