// The compiled variants of copy_stream.
#pragma once

#include <cstdint>

namespace zeroth::kernels::detail {

void copy_scalar(void* dst, const void* src, std::int64_t bytes);
void copy_avx2(void* dst, const void* src, std::int64_t bytes);
void copy_avx512(void* dst, const void* src, std::int64_t bytes);

}  // namespace zeroth::kernels::detail
