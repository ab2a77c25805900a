#include <kernels/bucket/bucket_cuda.h>
#include <kernels/bucket/bucket_grid.h>
#include <kernels/common/launch_cuda.h>

namespace zeroth::kernels {
namespace {

/// One atomic addition a warp that found something; integers do not care about the order. No thread's count
/// reaches 2^27: that would be 2^27 * 32 * 256 elements.
template <class Body>
__global__ void __launch_bounds__(kThreads)
    run_counting(const __grid_constant__ Body body, unsigned long long* nonfinite) {
  const auto of_thread = static_cast<unsigned>(body(this_thread()));
  const unsigned of_warp = __reduce_add_sync(0xffffffffU, of_thread);
  if (threadIdx.x % 32 == 0 && of_warp != 0) {
    atomicAdd(nonfinite, static_cast<unsigned long long>(of_warp));
  }
}

struct CountingLaunch {
  Launch launch;
  unsigned long long* nonfinite;

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    launch.run(run_counting<Body>, threads, body, nonfinite);
  }
};

}  // namespace
}  // namespace zeroth::kernels

extern "C" int zeroth_cuda_bucket(const zeroth::kernels::detail::BucketArgs* args, std::int64_t* nonfinite,
                                  void* stream) {
  zeroth::kernels::CountingLaunch counting{zeroth::kernels::Launch(stream),
                                           reinterpret_cast<unsigned long long*>(nonfinite)};
  const bool good = args != nullptr && nonfinite != nullptr && zeroth::kernels::bucket_on_grid(*args, counting);
  return good ? counting.launch.status() : cudaErrorInvalidValue;
}

extern "C" int zeroth_cuda_fill_zero(void* dst, std::int64_t bytes, void* stream) {
  if (bytes < 0) {
    return cudaErrorInvalidValue;
  }
  return bytes == 0 ? cudaSuccess
                    : cudaMemsetAsync(dst, 0, static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(stream));
}
