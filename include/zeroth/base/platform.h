// Compiler and platform facts.
#pragma once

#if !defined(__linux__)
#error "Zeroth runs on Linux: memfd, pidfd and futex are part of its transports"
#endif

#include <cstddef>

namespace zeroth {

/// Distance in bytes between objects of different writing ranks, so that they share no cache line (x86 prefetches
/// pairs).
inline constexpr std::size_t kCacheLineBytes = 128;
/// Alignment in bytes of every parameter segment, flat, shard and slot: one AVX-512 register. MKL may give other bits
/// for another alignment, and promises the same bits from 64 bytes on ("Obtaining Numerically Reproducible Results",
/// oneMKL developer guide).
inline constexpr std::size_t kSegmentAlignBytes = 64;
/// Size of a small page in bytes: alignment of arenas and of polled memory.
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
