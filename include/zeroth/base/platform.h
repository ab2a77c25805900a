// Compiler and platform facts. The only header below csrc/kernels that may hold an #if.
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

#if defined(ZEROTH_MUTATION)
/// Name of the planted fault that tests/mutations compiles in ("" in every real build).
inline constexpr const char* kMutation = ZEROTH_MUTATION;
#else
inline constexpr const char* kMutation = "";
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

}  // namespace zeroth
