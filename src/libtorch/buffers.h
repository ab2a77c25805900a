// Buffers (running statistics, tables): not partitioned, but everybody starts with rank 0's.
#pragma once

#include <zeroth/comm/communicator.h>
#include <zeroth/libtorch/model_description.h>

#include <cstdint>
#include <string>
#include <vector>

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

/// One digest a buffer, of its values; 0 for one that is undefined. Kernels of torch write running statistics without
/// autograd's count of writes.
[[nodiscard]] std::vector<std::uint64_t> buffer_digests(const ModelDescription& model);

/// Running statistics: buffers that are part of the weights and hold floating-point numbers.
[[nodiscard]] bool has_statistics(const ModelDescription& model);

/// Collective: gives every rank the owner's values (ModelDescription::buffer_owners, rank 0's by default) of the
/// buffers that any rank has `changed`. Wire: one small sum, and the bytes of these buffers in one message of each
/// owner. Throws as send_buffers().
void send_changed_buffers(const ModelDescription& model, const std::vector<bool>& changed,
                          const Communicator& communicator);

}  // namespace zeroth::libtorch
