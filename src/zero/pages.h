// How much an array takes in an arena, where each begins at a page.
#pragma once

#include <cstddef>
#include <cstdint>

#include <zeroth/base/dtype.h>
#include <zeroth/base/platform.h>
#include <zeroth/device/memory.h>

namespace zeroth {

/// Bytes of `elements`, rounded up to whole pages.
[[nodiscard]] inline std::size_t paged(std::int64_t elements, DType dtype) {
  return align_up(static_cast<std::size_t>(elements) * size_of(dtype), kPageBytes);
}

}  // namespace zeroth
