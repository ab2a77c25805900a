#include <kernels/common/lane.h>
#include <kernels/lamb/lamb_cpu.inl>

namespace zeroth::kernels::detail {

void lamb_measure_scalar(const LambArgs& args) {
  lamb_measure_any<Lane>(args);
}

void lamb_apply_scalar(const LambArgs& args) {
  lamb_apply_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
