#include <kernels/common/lane.h>
#include <kernels/reduce/reduce_cpu.inl>

namespace zeroth::kernels::detail {

void sum_sources_scalar(const SumSourcesArgs& args) {
  sum_sources_any<Lane>(args);
}

}  // namespace zeroth::kernels::detail
