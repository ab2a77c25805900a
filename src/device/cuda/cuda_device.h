// The CUDA device over a table of CUDA's functions.
#pragma once

#include "device/cuda/cuda_table.h"

#include <zeroth/device/cuda.h>

#include <memory>

namespace zeroth::detail {

/// As make_cuda_device(), with the functions of `cuda`, which must outlive everything.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(const CudaTable& cuda, int ordinal, Milliseconds timeout);

}  // namespace zeroth::detail
