#include <kernels/common/lane.h>
#include <kernels/sgd/sgd_cpu.inl>

namespace zeroth::kernels::detail {

void sgd_scalar(const SgdArgs& args) {
  sgd_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
