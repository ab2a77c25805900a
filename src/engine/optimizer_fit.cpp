#include "engine/optimizer_fit.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <string>

namespace zeroth {

void require_optimizer_fits(const EngineSettings& settings, const Optimizer& optimizer, const ShardGroups& groups,
                            bool on_host) {
  const bool early = settings.update.inside_backward || settings.update.delayed_after.has_value();
  ZR_CHECK(!early || !optimizer.has_messages(), ErrorCode::kConfig,
           "an update before the commit vote, or late, of an optimizer whose ranks exchange messages in it",
           {.where = "engine",
            .which = "/zeroth/update with optimizer " + std::string(optimizer.name()),
            .expected = "neither inside_backward nor delayed_after",
            .hint = "leave them out: messages are exchanged after the vote"});
  const auto is_split = [](const auto& group) { return group->spec().plan.degrees(group->size()).optimizer > 1; };
  ZR_CHECK(!optimizer.has_local_steps() || (on_host && std::ranges::none_of(groups, is_split)), ErrorCode::kConfig,
           "ranks that update with their own gradients have parameters of their own",
           {.where = "engine",
            .which = "/optimizer/params/local_step_clipper with optimizer " + std::string(optimizer.name()),
            .expected = "ZeRO stage 0 on ranks of a CPU, where every rank has all parameters; or 1",
            .got = on_host ? "parameters or optimizer states that ranks share" : "a device",
            .hint = "set it to 1: then ranks synchronise after every update, with one bit an element"});
  ZR_CHECK(!early || !optimizer.has_facts(), ErrorCode::kConfig,
           "an update before the commit vote, or late, of an optimizer that measures whole parameters first",
           {.where = "engine",
            .which = "/zeroth/update with optimizer " + std::string(optimizer.name()),
            .expected = "neither inside_backward nor delayed_after",
            .hint = "leave them out: the ranks measure all parameters together, after the vote"});
  const auto crosses = [](const auto& group) { return group->spec().plan.residency.updates_cross_bus(); };
  ZR_CHECK(!optimizer.has_messages() || std::ranges::none_of(groups, crosses), ErrorCode::kConfig,
           "states of an optimizer whose ranks exchange messages rest beside the device",
           {.where = "engine",
            .which = "/zero_optimization/offload_optimizer with optimizer " + std::string(optimizer.name()),
            .expected = "states on the device, or ranks of a CPU",
            .hint = "leave offload_optimizer out: momenta and errors are read and written where messages are formed. "
                    "Parameters may rest beside the device (offload_param)"});
}

}  // namespace zeroth
