#include <kernels/common/lane.h>
#include <kernels/lion/lion_cpu.inl>

namespace zeroth::kernels::detail {

void lion_scalar(const LionArgs& args) {
  lion_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
