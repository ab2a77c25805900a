// What must hold before anything is allocated: ranks agree, and the plan fits.
#pragma once

#include "engine/shard_group.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/engine/engine.h>

namespace zeroth {

/// Blocking. Throws kMismatch on every rank, naming the odd rank (see odd_rank.h), and the parameter or setting.
/// Settings are those of all ranks, parameters those of the ranks of a shard group; parts of a parameter on ranks that
/// share it make the whole of it (box_tiles.h).
void require_same_structure(const ShardGroups& groups, const EngineSettings& settings, const MeshPlace& place,
                            const Communicator& communicator);

/// Blocking. Throws kOutOfMemory on every rank if the plans of all ranks of this host together exceed what is
/// available; the message names the rank that has least, holds the table of stages 0 to 3 and names the smallest plan
/// that fits.
void require_plan_fits(const ShardGroups& groups, const EngineSettings& settings,
                       std::span<const StateDeclaration> states, const Communicator& communicator);

/// Blocking. Throws kIo on every rank if the ranks of a host together need more room in files than their folders have;
/// the message names the first rank of that host.
void require_files_fit(const ShardGroups& groups, const EngineSettings& settings,
                       std::span<const StateDeclaration> states, const Communicator& communicator);

/// Blocking. Throws kOutOfMemory on every rank if the plan of any goes over settings.budget on a tier: with the table
/// of the rank that is furthest over, states by tiers, and the key that would help.
void require_budgets(const ShardGroups& groups, const EngineSettings& settings,
                     std::span<const StateDeclaration> states, const Communicator& communicator);

}  // namespace zeroth
