#include <kernels/adamw/adamw_cpu.inl>
#include <kernels/common/lane.h>

namespace zeroth::kernels::detail {

void adamw_scalar(const AdamWArgs& args) {
  adamw_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
