// The compiled variants behind gate.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/moe/gate.h>

namespace zeroth::kernels::detail {

void gate_scalar(const GateArgs& args);
void gate_avx2(const GateArgs& args);
void gate_avx512(const GateArgs& args);
/// Return the first place [token, j] whose expert is none, or -1.
std::int64_t gate_backward_scalar(const GateBackwardArgs& args);
std::int64_t gate_backward_avx2(const GateBackwardArgs& args);
std::int64_t gate_backward_avx512(const GateBackwardArgs& args);

}  // namespace zeroth::kernels::detail
