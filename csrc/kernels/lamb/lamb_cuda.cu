#include <kernels/common/launch_cuda.h>
#include <kernels/lamb/lamb_cuda.h>
#include <kernels/lamb/lamb_grid.h>

namespace zeroth::kernels {
namespace {

/// All lanes of a warp go through the same blocks, so they meet at every exchange.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_lamb_lanes(const __grid_constant__ Body body) {
  static_assert(kNormLanes == 32 && kThreads % 32 == 0, "a block's lanes are the threads of one warp");
  const auto above = [](double a, int half) { return __shfl_down_sync(0xffffffffU, a, half); };
  body(this_thread(), [&](std::int64_t block, std::int64_t lane, double of_param, double of_update) {
    if constexpr (Body::kGreatest) {
      for (int half = 16; half > 0; half /= 2) of_update = lamb_greater(of_update, above(of_update, half));
    } else {
      of_param = norm_fold(of_param, above);
      of_update = norm_fold(of_update, above);
    }
    if (lane == 0) {
      if constexpr (!Body::kGreatest) body.param_squares[block] = of_param;
      body.update_measure[block] = of_update;
    }
  });
}

struct LambLanesLaunch {
  Launch launch;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch.run(run_lamb_lanes<Body>, threads, body);
  }
};

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_lamb_measure(const zeroth::kernels::LambArgs* args, void* stream) {
  zeroth::kernels::LambLanesLaunch lanes{zeroth::kernels::Launch(stream)};
  const bool good = args != nullptr && zeroth::kernels::lamb_measure_on_grid(*args, lanes);
  return good ? lanes.launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_lamb_apply(const zeroth::kernels::LambArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::lamb_apply_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
