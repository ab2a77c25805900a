// What a Collective is in NCCL's calls.
#pragma once

#include "comm/nccl/nccl_table.h"
#include "device/cuda/cuda_table.h"

#include <zeroth/base/dtype.h>
#include <zeroth/comm/collective.h>
#include <zeroth/comm/factory.h>

#include <span>
#include <string>
#include <string_view>

namespace zeroth::detail {

[[nodiscard]] NcclType nccl_type(DType dtype);
[[nodiscard]] NcclOp nccl_op(ReduceOp op);

/// Throws for a status that is neither success nor in progress: kPeerLost where another rank is to blame, kUsage for
/// arguments, else kResource. `call`: "an all_gather". `comm` may be null.
void check_nccl(const NcclTable& nccl, NcclStatus status, NcclComm comm, std::string_view call, std::string_view where,
                std::string_view who);

/// Throws kConfig or kUsage, in one line, for what NCCL cannot do with the bits that are asked for. Of a call that
/// validate() has passed.
void check_nccl_can(const Collective& call, int size, Reduction reduction, std::string_view where,
                    std::string_view who);

/// Throws kUsage if one of these calls reads or writes what another one writes: in one NCCL group they run in any
/// order.
void check_independent(std::span<const Collective> calls, int rank, std::string_view where, std::string_view who);

/// Where calls go.
struct NcclPlace {
  const NcclTable& nccl;
  const CudaTable& cuda;
  NcclComm comm = nullptr;
  void* stream = nullptr;
  void* scratch = nullptr;  ///< 4 bytes of the device, for barriers
  int rank = 0;
  int size = 1;
  std::string where{};
  std::string who{};
};

/// Gives the call to NCCL; inside a group. Throws as check_nccl() and check_cuda().
void give_to_nccl(const NcclPlace& place, const Collective& call);

/// Payload bytes that this rank receives from `peer` in a call, as CommBackend::submit() has them.
[[nodiscard]] std::uint64_t received_from(const Collective& call, int rank, int size, int peer);

}  // namespace zeroth::detail
