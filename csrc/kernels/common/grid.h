// The work of one thread of a CUDA grid on a range. The bodies of the kernels in <op>_grid.h use this header, and both
// device and host compile them. <op>_cuda.cu launches them. The test cuda_grid_test runs every thread of small grids on
// the host and compares with the CPU kernels, so grids, packs and tails are tested without a GPU. Internal linkage, see
// arch.h.
//
// An op has a function `bool <op>_on_grid(args, launch)`. It returns false, without a launch, for invalid arguments.
// Otherwise it calls launch(body, threads) for every launch, in stream order. A body is a value without pointers to
// host memory. body(GridThread) does the work of one thread, for any number of threads. `threads` is the number of
// threads with work.
#pragma once

#include <kernels/common/masters.h>
#include <kernels/common/pack.h>
#include <kernels/common/select.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Elements that a thread handles at once if all arrays are aligned: 16 bytes of fp32.
inline constexpr int kPack = 4;

/// Number of sources of one launch of a reduction. Their addresses are kernel arguments, which may have 4 KiB on every
/// device.
inline constexpr int kMostSources = 128;

struct GridThread {
  std::int64_t index;
  std::int64_t count;  ///< threads of the grid
};

template <int kNumber>
struct Count {
  static constexpr int kValue = kNumber;
};

/// Calls body(Count<kLanes>{}, i) for the packs of this thread, and body(Count<1>{}, i) for its elements after the last
/// pack. Neighbouring threads have neighbouring packs, so a warp reads whole lines. The next pack of a thread is one
/// grid size further.
template <int kLanes, class Body>
ZR_HOST_DEVICE ZR_INLINE void for_each_pack(GridThread thread, std::int64_t n, const Body& body) {
  const std::int64_t packs = n / kLanes;
  for (std::int64_t i = thread.index; i < packs; i += thread.count) {
    body(Count<kLanes>{}, i * kLanes);
  }
  if constexpr (kLanes > 1) {
    for (std::int64_t i = packs * kLanes + thread.index; i < n; i += thread.count) {
      body(Count<1>{}, i);
    }
  }
}

/// The sources of one of several launches, of which each goes on from the result of the one before.
struct SourcePart {
  int first;
  int count;
  bool resumes;
  bool ends;
};
/// Calls each(part) for parts of at most kMost sources, in order.
template <int kMost, class Each>
void for_each_source_part(int num_sources, const Each& each) {
  for (int first = 0; first < num_sources; first += kMost) {
    const int count = num_sources - first < kMost ? num_sources - first : kMost;
    each(SourcePart{first, count, first > 0, first + count == num_sources});
  }
}

/// True if `p` is aligned for packs of kPack elements; also true for null.
template <class T>
bool is_packable(const T* p) {
  return reinterpret_cast<std::uintptr_t>(p) % alignof(Elements<T, kPack>) == 0;
}
template <class T>
bool is_packable(WholeParams<T> params) {
  return is_packable(params.param);
}
inline bool is_packable(SplitMasters params) {
  return is_packable(params.high) && is_packable(params.low);
}
inline bool is_packable(WholeMasters params) {
  return is_packable(params.master) && is_packable(params.param);
}

/// Calls body(Count<kPack>{}), or body(Count<1>{}) if one of the arrays is not aligned for packs.
template <class Body>
void with_packs(bool packable, const Body& body) {
  if (packable) {
    body(Count<kPack>{});
  } else {
    body(Count<1>{});
  }
}

/// Number of threads with work in for_each_pack<kLanes>. The first threads also take the elements after the packs.
template <int kLanes>
constexpr std::int64_t threads_for(std::int64_t n) {
  return n / kLanes > n % kLanes ? n / kLanes : n % kLanes;
}

}  // namespace
}  // namespace zeroth::kernels
