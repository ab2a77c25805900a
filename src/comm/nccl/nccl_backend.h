// The backend over NCCL, with the libraries as something that tests can replace.
#pragma once

#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

#include <zeroth/comm/nccl.h>

#include <cstddef>
#include <functional>
#include <memory>

namespace zeroth::detail {

/// Both outlive every backend.
struct NcclLibraries {
  const NcclTable* nccl = nullptr;
  const CudaTable* cuda = nullptr;
};

/// As the public function. `load` is called once on every rank, and may throw: all ranks then hear of it.
[[nodiscard]] std::unique_ptr<CommBackend> make_nccl_backend(std::unique_ptr<CommBackend> base,
                                                             const CommOptions& options,
                                                             const std::function<NcclLibraries()>& load);

/// What a group over a base with windows holds on the host beyond that of its base; with CommOptions::check_calls one
/// more group of the base.
[[nodiscard]] std::size_t nccl_board_bytes();

}  // namespace zeroth::detail
