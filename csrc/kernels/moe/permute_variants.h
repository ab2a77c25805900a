// The compiled variants behind permute.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/moe/permute.h>

namespace zeroth::kernels::detail {

void permute_scalar(const PermuteArgs& args);
void permute_avx2(const PermuteArgs& args);
void permute_avx512(const PermuteArgs& args);
void unpermute_scalar(const UnpermuteArgs& args);
void unpermute_avx2(const UnpermuteArgs& args);
void unpermute_avx512(const UnpermuteArgs& args);
void unpermute_weights_scalar(const UnpermuteArgs& args);
void unpermute_weights_avx2(const UnpermuteArgs& args);
void unpermute_weights_avx512(const UnpermuteArgs& args);

}  // namespace zeroth::kernels::detail
