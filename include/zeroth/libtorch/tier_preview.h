// What an engine around a LibTorch model would need on each tier, before there is one.
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/libtorch/engine.h>
#include <zeroth/libtorch/model_description.h>
#include <zeroth/zero/tier_plan.h>

#include <vector>

namespace zeroth::libtorch {

/// See zeroth::preview_tiers(). Reads no values: memory of the tensors that nobody has written to stays so. Throws
/// kConfig and kModel as an engine would.
[[nodiscard]] TierTable preview_tiers(ModelDescription model, Config config, const std::vector<ParamGroup>& groups,
                                      int rank, int world);

}  // namespace zeroth::libtorch
