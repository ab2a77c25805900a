// Replicas: what several ranks have of the same elements, compared by digests. For zeroth.compare_replicas.
//
// Parameters and states are equal on all ranks that have them because all make the same updates of the same sums, or
// copy them from an owner. Memory that is damaged, a kernel that differs, or a program that writes on one rank breaks
// that, and no number of the step says so.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/compute/kernels.h>

namespace zeroth {

/// Collective over `job`, blocks; after an update is published. On all ranks or on none throws kMismatch, with the
/// first parameter and state in which a rank differs from the ranks that have the same elements. Reads every state that
/// more than one rank has. `after_messages`: the update was one of messages (StateShape::kReplica).
void require_same_replicas(const ShardGroups& groups, bool after_messages, const Communicator& job, Kernels& kernels,
                           const Stream& stream);

}  // namespace zeroth
