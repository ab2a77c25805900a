#include <kernels/common/launch_cuda.h>
#include <kernels/lowrank/lowrank_cuda.h>
#include <kernels/lowrank/lowrank_grid.h>

namespace zeroth::kernels {
namespace {

static_assert(kRankLanes == 16 && kThreads % 32 == 0, "the lanes of a sum are half a warp");

/// In lane 0 of each half of a warp. The halves of a warp need not come here together.
template <class T>
__device__ T folded_in_half_warp(T of_lane) {
  const unsigned half_warp = threadIdx.x % 32 < kRankLanes ? 0x0000ffffU : 0xffff0000U;
  return rank_fold(of_lane, [half_warp](T lanes, int by) {
    return __shfl_down_sync(half_warp, lanes, by, static_cast<int>(kRankLanes));
  });
}

template <class Body>
__global__ void __launch_bounds__(kThreads) run_rank_lanes(const __grid_constant__ Body body) {
  body(this_thread(), [&](std::int64_t element, std::int64_t lane, float of_lane) {
    const float sum = folded_in_half_warp(of_lane);
    if (lane == 0) {
      body.finish(element, sum);
    }
  });
}

/// The threads of a block, which all go through the same calls.
struct BlockTeam {
  std::int64_t index;
  std::int64_t count;
  double* sum;  ///< shared

  template <class Each>
  __device__ void each(const Each& each) const {
    each(static_cast<std::int64_t>(threadIdx.x), static_cast<std::int64_t>(kThreads));
    __syncthreads();
  }
  template <class OfLane>
  __device__ double folded(const OfLane& of_lane) const {
    if (threadIdx.x < kRankLanes) {
      const double all = folded_in_half_warp(of_lane(static_cast<std::int64_t>(threadIdx.x)));
      if (threadIdx.x == 0) {
        *sum = all;
      }
    }
    __syncthreads();
    const double all = *sum;
    __syncthreads();  // before the next one is written
    return all;
  }
  template <class Is>
  __device__ bool all(const Is& is) const {
    return __syncthreads_and(is(static_cast<std::int64_t>(threadIdx.x), static_cast<std::int64_t>(kThreads)) ? 1 : 0) !=
           0;
  }
};

template <class Body>
__global__ void __launch_bounds__(kThreads) run_teams(const __grid_constant__ Body body) {
  __shared__ double sum;
  body(BlockTeam{static_cast<std::int64_t>(blockIdx.x), static_cast<std::int64_t>(gridDim.x), &sum});
}

struct LowRankLaunch {
  Launch launch;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch(body, threads);
  }
  template <class Body>
  void lanes(const Body& body, std::int64_t threads) {
    launch.run(run_rank_lanes<Body>, threads, body);
  }
  template <class Body>
  void teams(const Body& body, std::int64_t teams) {
    launch.run(run_teams<Body>, teams * kThreads, body);
  }
};

/// `on_grid`: a function of lowrank_grid.h.
template <class Args, class OnGrid>
int launched(const Args* args, void* stream, const OnGrid& on_grid) {
  LowRankLaunch launch{Launch(stream)};
  const bool good = args != nullptr && on_grid(*args, launch);
  return good ? launch.launch.status() : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_lowrank_product(const zeroth::kernels::LowRankProductArgs* args, void* stream) {
  return zeroth::kernels::launched(args, stream, [](const auto& given, auto& launch) {
    return zeroth::kernels::lowrank_product_on_grid(given, launch);
  });
}

extern "C" int zeroth_cuda_lowrank_transposed_product(const zeroth::kernels::LowRankProductArgs* args, void* stream) {
  return zeroth::kernels::launched(args, stream, [](const auto& given, auto& launch) {
    return zeroth::kernels::lowrank_transposed_on_grid(given, launch);
  });
}

extern "C" int zeroth_cuda_lowrank_restore(const zeroth::kernels::LowRankRestoreArgs* args, void* stream) {
  return zeroth::kernels::launched(args, stream, [](const auto& given, auto& launch) {
    return zeroth::kernels::lowrank_restore_on_grid(given, launch);
  });
}

extern "C" int zeroth_cuda_lowrank_orthonormalize(const zeroth::kernels::OrthonormalizeArgs* args, void* stream) {
  return zeroth::kernels::launched(args, stream, [](const auto& given, auto& launch) {
    return zeroth::kernels::lowrank_orthonormalize_on_grid(given, launch);
  });
}

extern "C" int zeroth_cuda_lowrank_draw_missing(const zeroth::kernels::LowRankDrawArgs* args, void* stream) {
  return zeroth::kernels::launched(args, stream, [](const auto& given, auto& launch) {
    return zeroth::kernels::lowrank_draw_missing_on_grid(given, launch);
  });
}
