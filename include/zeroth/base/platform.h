// Compiler and platform facts.
#pragma once

#if !defined(__linux__)
#error "Zeroth runs on Linux: memfd, pidfd and futex are part of its transports"
#endif

#include <cstddef>

namespace zeroth {

/// Bytes between two objects that different ranks write, so that they never share a cache line (x86 prefetches pairs).
inline constexpr std::size_t kCacheLineBytes = 128;
/// Alignment of every parameter segment inside a flat buffer (one AVX-512 register; MKL gives other bits on other alignment).
inline constexpr std::size_t kSegmentAlignBytes = 64;
/// Alignment of every slot, shard and window: a small page.
inline constexpr std::size_t kPageBytes = 4096;
/// Size of a transparent huge page on x86-64; private arenas are rounded to it.
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

}  // namespace zeroth
