// From a Config to what an engine runs with.
#pragma once

#include <zeroth/comm/factory.h>
#include <zeroth/engine/config.h>
#include <zeroth/engine/engine.h>

#include <vector>

namespace zeroth {

/// Hyper-parameters of one parameter group as `config` gives them (learning rate before the schedule).
[[nodiscard]] GroupHyper group_hyper(const Config& config);

struct RankCount {
  int world = 1;
  int on_host = 1;  ///< those that share this rank's processors
};

/// `groups` are the parameter groups in order; threads are config.runtime.threads, or this rank's share of its host's
/// cores. Throws kConfig where the batch sizes do not fit the world.
[[nodiscard]] EngineSettings make_settings(const Config& config, RankCount ranks, std::vector<GroupHyper> groups);

/// `world`: ranks, which zeroth.ranks_per_node divides into nodes.
[[nodiscard]] CommOptions make_comm_options(const Config& config, int world);

}  // namespace zeroth
