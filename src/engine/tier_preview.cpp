#include "engine/coded_plan.h"
#include "engine/shard_group.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/tier_preview.h>

#include <memory>
#include <string>
#include <utility>

namespace zeroth {

TierTable preview_tiers(std::vector<ParamSpec> params, std::vector<UnitSpec> units, const EngineSettings& settings,
                        int rank, int world) {
  ZR_CHECK(world >= 1 && rank >= 0 && rank < world, ErrorCode::kUsage, "there is no such rank",
           {.where = "engine.plan",
            .which = "rank " + std::to_string(rank),
            .expected = "0 to " + std::to_string(world - 1)});
  const MeshPlace place = mesh_place_of(settings, rank, world);
  const std::vector<Degrees> degrees = degrees_of_groups(settings, place);
  const ModelLayout layout =
      make_model_layout(with_separate_vectors(std::move(params), settings), std::move(units), degrees);
  ModelParts split = split_model(layout, degrees);
  const ShardGroups groups = make_shard_groups(split, settings, place, world, {});
  const std::unique_ptr<Optimizer> optimizer = optimizer_of(settings);
  return planned_tiers(groups, settings, optimizer->states());
}

}  // namespace zeroth
