// Launches bodies of grid.h on a stream; only .cu files include it.
#pragma once

#include <kernels/common/grid.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace zeroth::kernels {
namespace {  // NOLINT(google-build-namespaces): see [Note: One definition per instruction set]

inline constexpr int kThreads = 256;
/// Enough blocks to fill any device several times. For longer ranges each thread repeats with the next grid.
inline constexpr std::int64_t kMaxBlocks = 16384;

__device__ __forceinline__ GridThread this_thread() {
  return {blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x,
          gridDim.x * static_cast<std::int64_t>(kThreads)};
}

inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(std::min((threads + kThreads - 1) / kThreads, kMaxBlocks));
}

/// The body stays in constant memory: its arrays of pointers are read with indices.
template <class Body>
__global__ void __launch_bounds__(kThreads) run_body(const __grid_constant__ Body body) {
  body(this_thread());
}

/// After the first failed launch it launches nothing more.
class Launch {
 public:
  explicit Launch(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <class Body>
  void operator()(const Body& body, std::int64_t threads) {
    run(run_body<Body>, threads, body);
  }

  /// Launches kernel(arguments...) with enough blocks for `threads` threads.
  template <class Kernel, class... Arguments>
  void run(Kernel kernel, std::int64_t threads, const Arguments&... arguments) {
    if (status_ == cudaSuccess) {
      kernel<<<blocks_for(threads), kThreads, 0, stream_>>>(arguments...);
      status_ = cudaGetLastError();
    }
  }

  [[nodiscard]] cudaError_t status() const { return status_; }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace
}  // namespace zeroth::kernels
