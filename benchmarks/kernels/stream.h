// The roof of an update: a kernel with the traffic of fp32 AdamW, 16 B read and 12 B written an element in place, and
// no arithmetic to speak of.
#pragma once

#include <kernels/common/dispatch.h>

#include <cstdint>

namespace zeroth::benchmarks {

struct StreamArrays {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  float* grad;
  float zero = 0.0F;  ///< from a volatile, so that the compiler does not know it
};

inline constexpr double kStreamBytes = 28;  ///< an element

// Compiled for each instruction set by the attribute. Adds g * 0, so that the values stay what they are.
[[gnu::always_inline]] inline void stream_body(const StreamArrays& a, std::int64_t begin, std::int64_t end) {
  const float zero = a.zero;
  float* __restrict__ p = a.param;
  float* __restrict__ m = a.exp_avg;
  float* __restrict__ v = a.exp_avg_sq;
  const float* __restrict__ g = a.grad;
  for (std::int64_t i = begin; i < end; ++i) {
    p[i] += g[i] * zero;
    m[i] += g[i] * zero;
    v[i] += g[i] * zero;
  }
}
inline void stream_scalar(const StreamArrays& a, std::int64_t begin, std::int64_t end) {
  stream_body(a, begin, end);
}
[[gnu::target("avx2")]] inline void stream_avx2(const StreamArrays& a, std::int64_t begin, std::int64_t end) {
  stream_body(a, begin, end);
}
[[gnu::target("avx512f,avx512vl,prefer-vector-width=512")]] inline void stream_avx512(const StreamArrays& a,
                                                                                      std::int64_t begin,
                                                                                      std::int64_t end) {
  stream_body(a, begin, end);
}

using StreamKernel = void(const StreamArrays&, std::int64_t begin, std::int64_t end);
[[nodiscard]] inline StreamKernel* stream_kernel(kernels::Isa isa) {
  return kernels::detail::select(isa, stream_scalar, stream_avx2, stream_avx512);
}

}  // namespace zeroth::benchmarks
