// The arithmetic of dispatch.h.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/moe/dispatch.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// See dispatch.h.
ZR_HOST_DEVICE ZR_INLINE std::uint64_t priority_of(std::uint64_t seed, std::int64_t token, std::int64_t choice) {
  std::uint64_t x = seed + 0x9e3779b97f4a7c15ULL *
                               (static_cast<std::uint64_t>(token) * 64U + static_cast<std::uint64_t>(choice) + 1U);
  x ^= x >> 30U;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27U;
  x *= 0x94d049bb133111ebULL;
  return x ^ x >> 31U;
}

/// Less for a greater weight; the greatest number for a NaN. Both zeros have one.
ZR_HOST_DEVICE ZR_INLINE std::uint64_t rank_of(double weight) {
  if (weight != weight) return ~std::uint64_t{0};
  constexpr std::uint64_t kSign = std::uint64_t{1} << 63U;
  const auto bits = __builtin_bit_cast(std::uint64_t, weight + 0.0);
  return (bits & kSign) != 0 ? bits : ~bits & ~kSign;
}

template <class W>
ZR_HOST_DEVICE ZR_INLINE W jittered(W x, W uniform, W twice, W least) {
  return canonical(x * fused(twice, uniform, least));
}

}  // namespace
}  // namespace zeroth::kernels
