#include <kernels/cast/cast_cpu.inl>
#include <kernels/common/lane.h>

namespace zeroth::kernels::detail {

void cast_scalar(const CastArgs& args) {
  cast_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
