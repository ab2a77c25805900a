// The compiled variants of adamw_step: the same contract, without its checks and its floating-point environment.
#pragma once

#include <kernels/adamw/adamw.h>

namespace zeroth::kernels::detail {

void adamw_scalar(const AdamWArgs& args);
void adamw_avx2(const AdamWArgs& args);
void adamw_avx512(const AdamWArgs& args);

}  // namespace zeroth::kernels::detail
