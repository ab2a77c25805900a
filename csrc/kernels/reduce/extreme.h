// The least or greatest of the sources of a reduction, element by element.
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

/// dst[i] = min or max over sources[k][i], on the calling thread; of equal values (0 and -0) that of the first source.
/// One NaN among floats makes the result the positive quiet NaN. Throws Error{kUsage}: num_sources < 1, n < 0.
void extreme_sources(const ExtremeSourcesArgs& args);

namespace detail {
/// Without checks and floating-point environment.
void extreme_sources_scalar(const ExtremeSourcesArgs& args);
}  // namespace detail

}  // namespace zeroth::kernels
