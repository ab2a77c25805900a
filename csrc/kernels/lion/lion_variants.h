// The compiled variants of lion_step: the same contract, without its checks and its floating-point environment.
#pragma once

#include <kernels/lion/lion.h>

namespace zeroth::kernels::detail {

void lion_scalar(const LionArgs& args);
void lion_avx2(const LionArgs& args);
void lion_avx512(const LionArgs& args);

}  // namespace zeroth::kernels::detail
