// The compiled variants of sum_sources: the same contract, without its checks and its floating-point environment.
#pragma once

#include <kernels/reduce/reduce.h>

namespace zeroth::kernels::detail {

void sum_sources_scalar(const SumSourcesArgs& args);
void sum_sources_avx2(const SumSourcesArgs& args);
void sum_sources_avx512(const SumSourcesArgs& args);

}  // namespace zeroth::kernels::detail
