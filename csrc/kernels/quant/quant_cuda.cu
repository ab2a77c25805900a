#include <kernels/common/launch_cuda.h>
#include <kernels/quant/quant_cuda.h>
#include <kernels/quant/quant_grid.h>

namespace zeroth::kernels {
namespace {

/// All lanes of a warp go through the same blocks of codes, so they meet at every exchange.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_scales(const __grid_constant__ Body body) {
  static_assert(kScaleLanes == 32 && kThreads % 32 == 0, "a block's lanes are the threads of one warp");
  body(this_thread(), [&](std::int64_t block, std::int64_t lane, float greatest) {
    for (int half = 16; half > 0; half /= 2) {
      const Lane<float> other{__shfl_down_sync(0xffffffffU, greatest, half)};
      greatest = Lane<float>::greater(Lane<float>{greatest}, other).v;
    }
    if (lane == 0) {
      body.finish(block, greatest);
    }
  });
}

struct ScalesLaunch {
  Launch& launch;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch.run(run_scales<Body>, threads, body);
  }
};

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_quantize(const zeroth::kernels::QuantizeArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  zeroth::kernels::ScalesLaunch scales{launch};
  const bool good = args != nullptr && zeroth::kernels::quantize_on_grid(*args, scales, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_dequantize(const zeroth::kernels::DequantizeArgs* args, void* stream) {
  zeroth::kernels::Launch launch(stream);
  const bool good = args != nullptr && zeroth::kernels::dequantize_on_grid(*args, launch);
  return good ? launch.status() : cudaErrorInvalidValue;
}
