// The compiled variants behind signs.h: contracts as there, without its checks and its floating-point environment.
#pragma once

#include <kernels/signs/signs.h>

namespace zeroth::kernels::detail {

void sign_message_scalar(const SignMessageArgs& args);
void sign_message_avx2(const SignMessageArgs& args);
void sign_message_avx512(const SignMessageArgs& args);
void sign_pack_scalar(const SignPackArgs& args);
void sign_pack_avx2(const SignPackArgs& args);
void sign_pack_avx512(const SignPackArgs& args);
void sign_sum_scalar(const SignSumArgs& args);
void sign_sum_avx2(const SignSumArgs& args);
void sign_sum_avx512(const SignSumArgs& args);

}  // namespace zeroth::kernels::detail
