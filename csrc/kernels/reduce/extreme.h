// Element-wise minimum or maximum of the sources of a reduction.
#pragma once

#include <zeroth/base/dtype.h>

#include <cstdint>

namespace zeroth::kernels {

struct ExtremeSourcesArgs {
  void* dst = nullptr;                   ///< [n] of `dtype`; may be exactly one of the sources, else overlaps none
  const void* const* sources = nullptr;  ///< [num_sources] pointers to [n] of `dtype`
  int num_sources = 0;                   ///< >= 1
  DType dtype = DType::kFloat32;         ///< any
  bool greatest = false;
  std::int64_t n = 0;
};

/// dst[i] = minimum or maximum over sources[k][i], on the calling thread. Among equal values (0 and -0) it takes that
/// of the first source. If any float is NaN, the result is the positive quiet NaN. Throws Error{kUsage} for num_sources
/// < 1 or n < 0.
void extreme_sources(const ExtremeSourcesArgs& args);

namespace detail {
/// The same without checks and floating-point environment.
void extreme_sources_scalar(const ExtremeSourcesArgs& args);
}  // namespace detail

}  // namespace zeroth::kernels
