// The compiled variants of lamb_measure and lamb_apply: the same contract, without its checks and its floating-point
// environment.
#pragma once

#include <kernels/lamb/lamb.h>

namespace zeroth::kernels::detail {

void lamb_measure_scalar(const LambArgs& args);
void lamb_measure_avx2(const LambArgs& args);
void lamb_measure_avx512(const LambArgs& args);
void lamb_apply_scalar(const LambArgs& args);
void lamb_apply_avx2(const LambArgs& args);
void lamb_apply_avx512(const LambArgs& args);

}  // namespace zeroth::kernels::detail
