// Loops over a range: wide vectors first, single lanes for the rest. Internal linkage, see arch.h.
#pragma once

#include <kernels/common/lane.h>
#include <kernels/common/select.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Ranges of at least this many bytes are written past the caches if they are not read soon. Smaller ranges fit in the
/// L2 cache, where the next reader finds them. Measured with benchmarks/kernels/memory_bench.
inline constexpr std::int64_t kStreamBytes = std::int64_t{256} << 10;
inline constexpr std::int64_t kStreamAlign = 64;

/// Calls body(Width<V<T>>{}, i) for every full vector of [begin, n), and body(Width<Lane<T>>{}, i) for the remaining
/// elements.
template <template <class> class V, class T, class Body>
ZR_INLINE void for_each_vector(std::int64_t begin, std::int64_t n, const Body& body) {
  std::int64_t i = begin;
  for (; i + V<T>::kLanes <= n; i += V<T>::kLanes) {
    body(Width<V<T>>{}, i);
  }
  for (; i < n; ++i) {
    body(Width<Lane<T>>{}, i);
  }
}

/// Number of elements of [p, p + n) before the first multiple of 64 bytes, where streaming stores may start.
template <class T>
ZR_INLINE std::int64_t elements_until_aligned(const T* p, std::int64_t n) {
  const auto misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p) % kStreamAlign);
  const std::int64_t elements =
      misaligned == 0 ? 0 : (kStreamAlign - misaligned) / static_cast<std::int64_t>(sizeof(T));
  return elements < n ? elements : n;
}

/// True if streaming stores pay for `n` elements at `p` and p is aligned to its type, so that it reaches a line
/// boundary.
template <class T>
ZR_INLINE bool wants_streaming(const T* p, std::int64_t n) {
  return n * static_cast<std::int64_t>(sizeof(T)) >= kStreamBytes &&
         reinterpret_cast<std::uintptr_t>(p) % sizeof(T) == 0;
}

/// A fence for streaming stores, which are weakly ordered: earlier ones become visible before any later store of this
/// thread (an epoch, a flag).
ZR_INLINE void stream_fence() {
  __builtin_ia32_sfence();
}

/// for_each_vector for a body that writes only dst[i] and never reads it. `kStream` of the body's third argument is
/// true if dst + i may be written with streaming stores.
struct CachedStores {
  static constexpr bool kStream = false;
};
struct StreamingStores {
  static constexpr bool kStream = true;
};
template <template <class> class V, class T, class Out, class Body>
ZR_INLINE void for_each_written(Out* dst, std::int64_t n, const Body& body) {
  if (!wants_streaming(dst, n)) {
    for_each_vector<V, T>(0, n, [&](auto width, std::int64_t i) { body(width, i, CachedStores{}); });
    return;
  }
  const std::int64_t head = elements_until_aligned(dst, n);
  for (std::int64_t i = 0; i < head; ++i) {
    body(Width<Lane<T>>{}, i, CachedStores{});
  }
  for_each_vector<V, T>(head, n, [&](auto width, std::int64_t i) { body(width, i, StreamingStores{}); });
  stream_fence();
}

template <bool kStream, class V, class T>
ZR_INLINE void write(V value, T* p) {
  if constexpr (kStream) {
    value.stream(p);
  } else {
    value.store(p);
  }
}

}  // namespace
}  // namespace zeroth::kernels
