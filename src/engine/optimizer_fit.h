// What an optimizer asks of the plan, the device and the order of an update.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/engine/engine.h>
#include <zeroth/optim/optimizer.h>

namespace zeroth {

/// Throws kConfig, naming the key, where the optimizer's messages, own steps or facts of whole parameters cannot be
/// had. `on_host`: the ranks are of a CPU.
void require_optimizer_fits(const EngineSettings& settings, const Optimizer& optimizer, const ShardGroups& groups,
                            bool on_host);

}  // namespace zeroth
