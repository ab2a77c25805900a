// The compiled variants behind cast_range: contract as there, without its checks and its floating-point
// environment.
#pragma once

#include <kernels/cast/cast.h>

namespace zeroth::kernels::detail {

struct CastArgs {
  void* dst;
  DType dst_dtype;
  const void* src;
  DType src_dtype;
  std::int64_t n;
};

void cast_scalar(const CastArgs& args);
void cast_avx2(const CastArgs& args);
void cast_avx512(const CastArgs& args);

}  // namespace zeroth::kernels::detail
