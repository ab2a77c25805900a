// The module zeroth_cuda on a fake GPU: its kernels' bodies run on the host when the stream comes to them.
#pragma once

#include "compute/cuda_kernels.h"
#include "support/fake_gpu.h"

#include <atomic>
#include <cstdint>

namespace zeroth::test {

/// C functions have no object, so there is one at a time. Each launch runs its threads in another order.
class GridKernels {
 public:
  explicit GridKernels(FakeGpu& gpu);
  GridKernels(const GridKernels&) = delete;
  GridKernels& operator=(const GridKernels&) = delete;
  ~GridKernels();

  [[nodiscard]] const detail::CudaKernelTable& table() const { return table_; }
  /// Kernels that have run.
  [[nodiscard]] std::int64_t runs() const { return runs_; }

 private:
  friend struct GridCalls;
  FakeGpu& gpu_;
  detail::CudaKernelTable table_;
  std::atomic<std::int64_t> runs_{0};
};

}  // namespace zeroth::test
