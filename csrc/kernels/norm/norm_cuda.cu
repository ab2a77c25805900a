#include <kernels/common/launch_cuda.h>
#include <kernels/norm/norm_cuda.h>
#include <kernels/norm/norm_grid.h>

namespace zeroth::kernels {
namespace {

/// All lanes of a warp go through the same blocks, so they meet at every exchange.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_lanes(const __grid_constant__ Body body) {
  static_assert(kNormLanes == 32 && kThreads % 32 == 0, "a block's lanes are the threads of one warp");
  body(this_thread(), [&](std::int64_t block, std::int64_t lane, double sum) {
    sum = norm_fold(sum, [](double a, int half) { return __shfl_down_sync(0xffffffffU, a, half); });
    if (lane == 0) {
      body.sums[block] = sum;
    }
  });
}

struct LanesLaunch {
  Launch launch;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch.run(run_lanes<Body>, threads, body);
  }
};

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_norm_blocks(const void* src, zeroth::DType dtype, std::int64_t n, double* sums,
                                       void* stream) {
  zeroth::kernels::LanesLaunch lanes{zeroth::kernels::Launch(stream)};
  const bool good = zeroth::kernels::norm_on_grid(src, dtype, n, sums, lanes);
  return good ? lanes.launch.status() : cudaErrorInvalidValue;
}
