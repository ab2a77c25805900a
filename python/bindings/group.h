// Worlds whose messages a group of torch.distributed carries.
#pragma once

#include "bindings.h"

#include <zeroth/engine/world.h>

namespace zeroth::python {

/// `group`: a torch.distributed.ProcessGroup, or None for the default one.
[[nodiscard]] World world_from_group(py::object group);

/// World::from_environment(), and where that has no transport between the hosts: the default group of
/// torch.distributed, which is made, over gloo, if there is none and torch's variables say where ranks meet. Collective
/// then, blocks until all ranks are there.
[[nodiscard]] World world_from_environment();

}  // namespace zeroth::python
