// The compiled variants behind jitter() of dispatch.h: its contract, without its checks and its floating-point
// environment.
#pragma once

#include <kernels/moe/dispatch.h>

namespace zeroth::kernels::detail {

void jitter_scalar(const JitterArgs& args);
void jitter_avx2(const JitterArgs& args);
void jitter_avx512(const JitterArgs& args);

}  // namespace zeroth::kernels::detail
