// The staging backend over a table of CUDA's functions.
#pragma once

#include "device/cuda/cuda_table.h"

#include <zeroth/comm/staging.h>

#include <functional>
#include <memory>

namespace zeroth::detail {

/// As make_staging_backend(), with the functions that `load` gives, which must outlive everything. It is called at the
/// first call on a CUDA stream.
[[nodiscard]] std::unique_ptr<CommBackend> make_staging_backend(std::unique_ptr<CommBackend> base,
                                                                const CommOptions& options,
                                                                std::function<const CudaTable&()> load);

}  // namespace zeroth::detail
