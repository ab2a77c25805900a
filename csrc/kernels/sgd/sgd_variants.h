// The compiled variants of sgd_step: the same contract, without its checks and its floating-point environment.
#pragma once

#include <kernels/sgd/sgd.h>

namespace zeroth::kernels::detail {

void sgd_scalar(const SgdArgs& args);
void sgd_avx2(const SgdArgs& args);
void sgd_avx512(const SgdArgs& args);

}  // namespace zeroth::kernels::detail
