// What one thread of a CUDA grid does with a range. The bodies of the kernels are written against this header
// in <op>_grid.h, which the device and the host compile alike: <op>_cuda.cu launches them, and the test
// cuda_grid_test runs every thread of small grids on the host and compares with the CPU kernels, so that
// grids, packs and tails are proved where there is no GPU. Internal linkage, see arch.h.
//
// An op offers `bool <op>_on_grid(args, launch)`: false, and nothing launched, if the arguments are no good;
// else it calls launch(body, threads) for every launch, in their order on a stream. A body is a value without
// pointers into the host's memory; body(GridThread) does the work of one thread of any number of them;
// `threads` is how many have work.
#pragma once

#include <kernels/common/masters.h>
#include <kernels/common/pack.h>
#include <kernels/common/select.h>

#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

/// Elements that a thread handles at once where everything is aligned: 16 bytes of fp32.
inline constexpr int kPack = 4;

/// Sources of one launch of a reduction: their addresses travel with it, within the 4 KiB that every device
/// takes.
inline constexpr int kMostSources = 128;

struct GridThread {
  std::int64_t index;
  std::int64_t count;  ///< threads of the grid
};

template <int kNumber>
struct Count {
  static constexpr int kValue = kNumber;
};

/// body(Count<kLanes>{}, i) for the packs of this thread, body(Count<1>{}, i) for its elements behind the
/// last pack. Neighbouring threads have neighbouring packs, so a warp reads whole lines; a thread whose turn
/// is over goes on one grid further.
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

/// Whether packs of kPack elements may be used from `p` on. Null is.
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

/// body(Count<kPack>{}), or body(Count<1>{}) where one of the arrays is not aligned for packs.
template <class Body>
void with_packs(bool packable, const Body& body) {
  if (packable) {
    body(Count<kPack>{});
  } else {
    body(Count<1>{});
  }
}

/// Threads that have work in for_each_pack<kLanes>: the first ones take the elements behind the packs, too.
template <int kLanes>
constexpr std::int64_t threads_for(std::int64_t n) {
  return n / kLanes > n % kLanes ? n / kLanes : n % kLanes;
}

}  // namespace
}  // namespace zeroth::kernels
