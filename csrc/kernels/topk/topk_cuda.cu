#include <kernels/common/launch_cuda.h>
#include <kernels/topk/topk_cuda.h>
#include <kernels/topk/topk_grid.h>

namespace zeroth::kernels {
namespace {

/// A table a block, which goes to the counts of all blocks in the end.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_digits(const __grid_constant__ Body body) {
  __shared__ std::uint32_t table[kTopkBins];
  for (std::int64_t bin = threadIdx.x; bin < kTopkBins; bin += kThreads) {
    table[bin] = 0;
  }
  __syncthreads();
  body(this_thread(), [&](std::uint32_t digit) { atomicAdd(&table[digit], 1U); });
  __syncthreads();
  for (std::int64_t bin = threadIdx.x; bin < kTopkBins; bin += kThreads) {
    if (table[bin] != 0) {
      atomicAdd(&body.counts[bin], table[bin]);
    }
  }
}

/// One block. Ref: Hillis, Steele, "Data parallel algorithms", 1986: sums over 1, 2, 4, ... lanes.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_scan(const __grid_constant__ Body body) {
  static_assert(kScanLanes == kThreads, "a lane is a thread");
  using Sum = typename Body::Sum;
  __shared__ Sum sums[kThreads];
  const unsigned lane = threadIdx.x;
  const Sum own = body.sum(lane);
  Sum all = own;
  for (unsigned by = 1; by < kThreads; by *= 2) {
    sums[lane] = all;
    __syncthreads();
    if (lane >= by) {
      all = all + sums[lane - by];
    }
    __syncthreads();
  }
  body.finish(lane, all - own);
}

/// The lanes of a warp, which are its threads: all of them go through the same calls.
struct WarpLanes {
  template <class Is>
  __device__ std::uint32_t vote(const Is& is) const {
    return __ballot_sync(0xffffffffU, is(lane()));
  }
  template <class Each>
  __device__ void each(const Each& each) const {
    each(lane());
  }
  __device__ std::uint32_t count(std::uint32_t mask) const { return static_cast<std::uint32_t>(__popc(mask)); }

 private:
  __device__ static std::int64_t lane() { return threadIdx.x % 32; }
};

template <class Body>
__global__ void __launch_bounds__(kThreads) run_warps(const __grid_constant__ Body body) {
  static_assert(kTopkLanes == 32 && kThreads % 32 == 0, "lanes are the threads of one warp");
  const GridThread thread = this_thread();
  body(GridThread{thread.index / 32, thread.count / 32}, WarpLanes{});
}

template <class Body>
__global__ void __launch_bounds__(kThreads)
    run_outside(const __grid_constant__ Body body, unsigned long long* outside) {
  const auto of_thread = static_cast<unsigned>(body(this_thread()));
  const unsigned of_warp = __reduce_add_sync(0xffffffffU, of_thread);
  if (threadIdx.x % 32 == 0 && of_warp != 0) {
    atomicAdd(outside, static_cast<unsigned long long>(of_warp));
  }
}

struct TopkLaunch {
  Launch launch;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch(body, threads);
  }
  template <class Body>
  void count(const Body& body, std::int64_t threads) {
    launch.run(run_digits<Body>, threads, body);
  }
  template <class Body>
  void scan(const Body& body) {
    launch.run(run_scan<Body>, kScanLanes, body);
  }
  template <class Body>
  void warps(const Body& body, std::int64_t warps) {
    launch.run(run_warps<Body>, warps * kTopkLanes, body);
  }
};

struct OutsideLaunch {
  Launch launch;
  unsigned long long* outside;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch.run(run_outside<Body>, threads, body, outside);
  }
};

}  // namespace
}  // namespace zeroth::kernels

extern "C" std::int64_t zeroth_cuda_topk_workspace(std::int64_t n) {
  return zeroth::kernels::topk_workspace_bytes(n);
}

extern "C" int zeroth_cuda_topk(const zeroth::kernels::TopkArgs* args, void* workspace, void* stream) {
  zeroth::kernels::TopkLaunch topk{zeroth::kernels::Launch(stream)};
  const bool good = args != nullptr && zeroth::kernels::topk_on_grid(*args, workspace, topk);
  return good ? topk.launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_topk_outside(const zeroth::kernels::TopkAddArgs* args, std::int64_t* outside, void* stream) {
  zeroth::kernels::OutsideLaunch counting{zeroth::kernels::Launch(stream),
                                          reinterpret_cast<unsigned long long*>(outside)};
  const bool good = args != nullptr && outside != nullptr && zeroth::kernels::topk_outside_on_grid(*args, counting);
  return good ? counting.launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_topk_add(const zeroth::kernels::TopkAddArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::topk_add_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
