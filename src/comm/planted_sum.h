// What the mutation tests plant into sums over ranks.
#pragma once

#include <zeroth/base/dtype.h>
#include <zeroth/base/planted.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zeroth::detail {

/// The planted fault "reduction_ulp": the sum of rank 1 is one unit in the last place off.
inline void plant_ulp(int rank, std::byte* sum, DType dtype) {
  if (!planted("reduction_ulp") || rank != 1 || !is_floating(dtype)) return;
  const auto raise = [sum](auto bits) {
    std::memcpy(&bits, sum, sizeof bits);
    ++bits;
    std::memcpy(sum, &bits, sizeof bits);
  };
  if (size_of(dtype) == 8) raise(std::uint64_t{0});
  if (size_of(dtype) == 4) raise(std::uint32_t{0});
  if (size_of(dtype) == 2) raise(std::uint16_t{0});
}

}  // namespace zeroth::detail
