// The boxes that ranks have of a tensor make the whole of it, once.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/comm/mesh.h>

namespace zeroth {

/// Throws kMismatch, on all ranks, if the boxes of a tensor leave elements out, or overlap, or if the ranks of an axis
/// along which they should differ have the same one: then the model was split along another mesh. Collective, blocks,
/// if any parameter is a box. Wire: a text of the boxes, from one rank of each shard group.
void require_tiles(const ShardGroups& groups, const MeshPlace& place, const Communicator& communicator);

}  // namespace zeroth
