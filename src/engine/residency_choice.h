// Which blocks of states rest in files, chosen when an engine is made: by measured speeds, and by the memory there is.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/engine/engine.h>

#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// Throws kConfig without a folder for states in files, and kIo for one that is not there or may not be written to.
/// `section`: of the configuration, "/zero_optimization/offload_param".
void require_folder(const std::vector<std::string>& folders, std::string_view section);

/// Sets the residency of the groups whose plan has plans_ratio, the same on all ranks: blocks of the rank with most,
/// times of the slowest. Collective, blocks for about a second at most, but for disks that stand still: then for the
/// timeout of a transfer. Returns what was chosen and why; "" if no plan asks for it.
/// Throws kIo on all ranks, naming the rank, if files could not be measured.
[[nodiscard]] std::string choose_residency(const ShardGroups& groups, const EngineSettings& settings,
                                           const Optimizer& optimizer, Kernels& kernels, Device& device,
                                           const Communicator& communicator);

}  // namespace zeroth
