// What an engine would need on each tier, before there is one. Pure and local.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/zero/tier_plan.h>

#include <vector>

namespace zeroth {

/// The table that an engine of these settings plans on `rank` of `world` ranks, on CPUs that share memory; nothing is
/// allocated, and no other rank is asked. A ratio that is planned counts as given. Throws what Engine's constructor
/// throws for settings that do not fit together.
[[nodiscard]] TierTable preview_tiers(std::vector<ParamSpec> params, std::vector<UnitSpec> units,
                                      const EngineSettings& settings, int rank, int world);

}  // namespace zeroth
