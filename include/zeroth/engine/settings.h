// From a Config to the settings of an engine.
#pragma once

#include <zeroth/comm/factory.h>
#include <zeroth/engine/config.h>
#include <zeroth/engine/engine.h>

#include <string_view>
#include <vector>

namespace zeroth {

/// Hyper-parameters of the configuration's group; the learning rate is the one before the schedule.
[[nodiscard]] GroupHyper group_hyper(const Config& config);

struct RankCount {
  int world = 1;
  int on_host = 1;  ///< ranks that share this rank's processors
};

/// The axes of the configuration's mesh: pp, if there are several stages, dp, ep, if ranks have other experts, rows, if
/// ranks share images, sp and tp; dp from the number of ranks. Throws kConfig if they do not multiply to it.
[[nodiscard]] MeshSpec mesh_of(const Config& config, int world);

/// Ranks with batches of their own: dp x ep. Throws the errors of mesh_of().
[[nodiscard]] int data_ranks_of(const Config& config, int world);

/// Micro-steps of a step: gradient_accumulation_steps, or what the batch sizes leave. Throws the errors of mesh_of()
/// and Config::resolve().
[[nodiscard]] int micro_steps_of(const Config& config, int world);

/// True if the stages of a pipeline gather their parameters once a step, and the program says when.
[[nodiscard]] bool keeps_parameters(const Config& config);

/// When the program of a pipeline gathers the parameters of a chunk: "none", "micro_batch" or "step".
[[nodiscard]] std::string_view unshard_of(const Config& config);

/// `groups`: the parameter groups in order. The thread count is config.runtime.threads, or this rank's share of its
/// host's cores if that is 0. Throws kConfig if the batch sizes do not fit the world.
[[nodiscard]] EngineSettings make_settings(const Config& config, RankCount ranks, std::vector<GroupHyper> groups);

/// Transport options. `world`: number of ranks, which zeroth.ranks_per_node divides into nodes.
[[nodiscard]] CommOptions make_comm_options(const Config& config, int world);

}  // namespace zeroth
