// Numbers that look random, from a seed and the number of an element: the same whatever the split of a range.
#pragma once

#include <kernels/common/arch.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Factors of the hash: the golden ratio, and those of the finalizer.
inline constexpr std::uint32_t kSpread = 0x9e3779b9U;
inline constexpr std::uint32_t kMixFirst = 0x85ebca6bU;
inline constexpr std::uint32_t kMixLast = 0xc2b2ae35U;

/// A uniform number of [0, 1) with 24 bits, for an element. Ref: the finalizer of MurmurHash3 by Appleby.
ZR_HOST_DEVICE ZR_INLINE float uniform_of(std::uint32_t seed, std::uint32_t element) {
  std::uint32_t x = element * kSpread ^ seed;
  x ^= x >> 16U;
  x *= kMixFirst;
  x ^= x >> 13U;
  x *= kMixLast;
  x ^= x >> 16U;
  return static_cast<float>(x >> 8U) * 0x1p-24F;
}

}  // namespace
}  // namespace zeroth::kernels
