// Buffers (running statistics, tables): not partitioned, but everybody starts with rank 0's.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/model_description.h>

namespace zeroth::libtorch {

/// Collective. Throws kMismatch on every rank if names, shapes or dtypes are not alike, kModel for buffers that are not
/// dense (sparse, nested), or neither on the CPU nor on a GPU. Of an expanded buffer the memory behind it is shared.
/// One rank shares nothing, and may have any.
void require_shareable(const ModelDescription& model, const Communicator& communicator);

/// Collective, after require_shareable(). Gives every rank rank 0's buffers; returns the name of the first one whose
/// values differed here, or "". Wire: the bytes of all buffers.
[[nodiscard]] std::string share_buffers(const ModelDescription& model, const Communicator& communicator);

/// Collective. The same without the comparison of values. Throws kMismatch on every rank if buffers have been replaced
/// by others that are not alike.
void send_buffers(const ModelDescription& model, const Communicator& communicator);

}  // namespace zeroth::libtorch
