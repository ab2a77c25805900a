// Whether the buffers of a call are where its stream can reach them.
#pragma once

#include "device/cuda/cuda_table.h"

#include <zeroth/comm/collective.h>

#include <span>
#include <string_view>

namespace zeroth::detail {

/// The device for a rank's calls: `wanted`, or with -1 the one that is current on this thread. Throws kConfig where
/// there is none of that number.
[[nodiscard]] int choose_device(const CudaTable& cuda, int wanted, std::string_view where);

/// Throws kUsage for a buffer that `device` does not have: of another device, or pageable memory of the host.
void check_device_buffers(const CudaTable& cuda, int device, const Collective& call, int rank, std::string_view where,
                          std::string_view who);

/// Throws kUsage for calls on a stream of the host with memory that only a device can read. Both look at what a rank
/// uses of calls that validate() has let through.
void check_host_buffers(const CudaTable& cuda, std::span<const Collective> calls, int rank, std::string_view where,
                        std::string_view who);

}  // namespace zeroth::detail
