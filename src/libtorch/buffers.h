// Buffers (running statistics, tables): not partitioned, but everybody starts with rank 0's.
#pragma once

#include <zeroth/libtorch/model_description.h>

#include <zeroth/comm/communicator.h>

namespace zeroth::libtorch {

/// Collective. Gives every rank rank 0's buffers; returns the name of the first one whose values differed
/// here, or "". Throws kMismatch on every rank if names, shapes or dtypes are not alike, kModel for buffers
/// that are not dense, or neither on the CPU nor on a GPU. Wire: the bytes of all buffers.
[[nodiscard]] std::string share_buffers(const ModelDescription& model, const Communicator& communicator);

/// Collective. The same without the comparison of structures, for buffers that have been shared before.
void send_buffers(const ModelDescription& model, const Communicator& communicator);

}  // namespace zeroth::libtorch
