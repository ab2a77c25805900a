#include <zeroth/base/cores.h>
#include <zeroth/base/error.h>
#include <zeroth/engine/param_axes.h>
#include <zeroth/engine/settings.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

namespace {

ShardingPlan plan_of(const ZeroConfig& zero, const std::vector<std::string>& axes) {
  ShardingPlan plan = zero_plan(zero.stage, axes);
  if (zero.mics_shard_size > 0) plan = mics_plan(zero.mics_shard_size, axes);
  // Where parameters travel in codes, they rest split over all ranks, and a group keeps what it has gathered.
  if (zero.hpz_partition_size > 1 && !zero.quantized_weights) plan = hpz_plan(zero.hpz_partition_size, axes);
  if (zero.parameter_degree > 0) plan.parameter_degree = zero.parameter_degree;
  if (zero.optimizer_degree > 0) plan.optimizer_degree = zero.optimizer_degree;
  plan.gradient_degree = zero.gradient_degree;
  plan.policy = zero.reduction_policy;
  plan.reshard = zero.reshard;
  plan.ring_slots = zero.ring_slots;
  plan.prefetch_units = zero.prefetch_units;
  plan.narrow_buckets = zero.narrow_buckets;
  if (zero.has_codes()) {
    plan.codes = {.parameter_bits = zero.quantized_weights ? 8 : 0,
                  .gradient_bits = zero.quantized_gradients ? zero.code_bits : 0,
                  .feedback = zero.code_feedback,
                  .node_degree = std::max(zero.code_node_degree, zero.hpz_partition_size),
                  .block = zero.code_block};
  }
  return plan;
}

Residency residency_named(const std::string& device) {
  if (device == "nvme") return Residency::kFiles;
  return device == "cpu" ? Residency::kHost : Residency::kDevice;
}

ResidencyPlan residency_of(const OffloadConfig& offload) {
  return {.optimizer = residency_named(offload.optimizer_device),
          .parameter = residency_named(offload.parameter_device),
          .gradient = offload.gradients == "host" ? Residency::kHost : Residency::kDevice,
          .optimizer_ratio = offload.ratio,
          .block_elements = offload.block_elements.value_or(ResidencyPlan().block_elements),
          .slots = offload.buffer_count,
          .parameter_elements = offload.max_in_cpu,
          .chooses_blocks = !offload.block_elements,
          .plans_ratio = offload.ratio_from == "planned",
          .cache_blocks = offload.cache_blocks};
}

/// "~" and "~/..." as a shell has them.
std::string with_home(const std::string& folder) {
  const char* const home = std::getenv("HOME");
  if (home == nullptr || (folder != "~" && !folder.starts_with("~/"))) return folder;
  return home + folder.substr(1);
}

std::vector<std::string> folders_of(const std::string& path) {
  std::vector<std::string> folders;
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) folders.push_back(with_home(path.substr(begin, end - begin)));
    begin = end + 1;
  }
  return folders;
}

StorageSettings storage_of(const OffloadConfig& offload) {
  return {.folders = folders_of(offload.nvme_path),
          .parameter_folders = folders_of(offload.parameter_nvme_path),
          .engine = io_engine_of(offload.io).value_or(IoEngineKind::kAuto),
          .access = offload.direct ? FileAccess::kDirect : FileAccess::kBuffered,
          .queue_depth = offload.queue_depth,
          .stripe_bytes = static_cast<std::size_t>(offload.stripe_bytes)};
}

/// The section offload says what moves the bytes.
std::optional<ActivationStoreOptions> activations_of(const ActivationConfig& activations,
                                                     const OffloadConfig& offload) {
  if (activations.tier() != "nvme") return std::nullopt;
  ZR_CHECK(!activations.nvme_path.empty(), ErrorCode::kConfig, "activations that rest in files have no folder",
           {.where = "engine.settings",
            .which = "/zeroth/activations/nvme_path",
            .expected = "a folder on a local disk, or several separated by ':'"});
  const auto piece = static_cast<std::size_t>(offload.stripe_bytes);
  const StorageSettings storage = storage_of(offload);
  return ActivationStoreOptions{
      .folders = folders_of(activations.nvme_path),
      .access = storage.access,
      .piece_bytes = piece,
      .slots = ActivationStore::slots_in(static_cast<std::size_t>(activations.buffer_bytes), piece),
      .prefetch = activations.prefetch,
      .io = {.engine = storage.engine, .depth = storage.queue_depth}};
}

}  // namespace

GroupHyper group_hyper(const Config& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  return {.lr = config.scheduler.base_lr(optimizer.lr),
          .beta1 = optimizer.moments()[0],
          .beta2 = optimizer.moments()[1],
          .eps = optimizer.eps,
          .weight_decay = optimizer.decay(),
          .momentum = optimizer.momentum,
          .dampening = optimizer.dampening,
          .nesterov = optimizer.nesterov};
}

MeshSpec mesh_of(const Config& config, int world) {
  const int ep = config.mesh.ep;
  const int rows = config.mesh.rows;
  const int sp = config.mesh.sp;
  const int tp = std::max(1, config.mesh.tp);
  const int pp = config.mesh.pp;
  const std::string others = (pp > 1 ? "pp=" + std::to_string(pp) + ", " : "") +
                             (ep > 1 ? "ep=" + std::to_string(ep) + ", " : "") + "sp=" + std::to_string(sp) +
                             ", tp=" + std::to_string(tp);
  ZR_CHECK(rows == 1 || (pp == 1 && ep == 1 && sp == 1 && tp == 1), ErrorCode::kConfig,
           "ranks that share images share nothing else",
           {.where = "engine.settings",
            .which = "/zeroth/mesh/rows = " + std::to_string(rows),
            .expected = "pp=1, ep=1, sp=1 and tp=1",
            .got = others});
  ZR_CHECK(ep == 1 || config.runtime.uneven != Uneven::kJoin, ErrorCode::kConfig,
           "a rank without a batch would not take part in the calls of layers of experts",
           {.where = "engine.settings",
            .which = "/zeroth/uneven beside /zeroth/mesh/ep = " + std::to_string(ep),
            .expected = "error or drop",
            .got = "join",
            .hint = "drop ends the loops of all ranks with the first; or give all ranks as many batches"});
  const std::int64_t inner = std::int64_t{pp} * ep * rows * sp * tp;
  const std::int64_t dp = config.mesh.dp > 0 ? config.mesh.dp : world / inner;
  const bool left = config.mesh.dp == 0;
  ZR_CHECK(
      dp >= 1 && dp * inner == world, ErrorCode::kConfig, "the mesh does not fit the number of ranks",
      {.where = "engine.settings",
       .which = "/zeroth/mesh: " + (left ? std::string() : "dp=" + std::to_string(dp) + ", ") +
                (rows > 1 ? "rows=" + std::to_string(rows) : others),
       .expected = left ? "a multiple of " + std::to_string(inner) + " ranks" : std::to_string(dp * inner) + " ranks",
       .got = std::to_string(world),
       .hint = left ? "" : "without dp it is what the other axes leave"});
  MeshSpec mesh{{{.name = "dp", .size = static_cast<int>(dp)}, {.name = "sp", .size = sp}, {.name = "tp", .size = tp}}};
  if (ep > 1) mesh.axes.insert(mesh.axes.begin() + 1, {.name = std::string(kExpertAxis), .size = ep});
  if (rows > 1) mesh.axes.insert(mesh.axes.begin() + 1, {.name = "rows", .size = rows});
  if (pp > 1) mesh.axes.insert(mesh.axes.begin(), {.name = std::string(kPipelineAxis), .size = pp});
  return mesh;
}

int data_ranks_of(const Config& config, int world) {
  return MeshPlace(mesh_of(config, world), 0, world).size("dp") * config.mesh.ep;
}

int micro_steps_of(const Config& config, int world) {
  const int data_ranks = data_ranks_of(config, world);
  config.require_data_ranks(data_ranks);
  // Without any batch size in the document there is one micro-step; else the sizes must fit the world.
  const bool sized = config.train_batch_size || config.train_micro_batch_size_per_gpu;
  return static_cast<int>(sized ? config.resolve(data_ranks).accumulate
                                : config.gradient_accumulation_steps.value_or(1));
}

std::string_view unshard_of(const Config& config) {
  ShardingPlan plan = plan_of(config.zero, {"dp"});
  plan.residency = residency_of(config.offload);
  if (config.mesh.pp <= 1 || !plan.gathers_parameters()) return "none";
  return config.pipeline.unshard == "step" || config.zero.reshard == Reshard::kNone ? "step" : "micro_batch";
}

bool keeps_parameters(const Config& config) {
  return unshard_of(config) == "step";
}

EngineSettings make_settings(const Config& config, RankCount ranks, std::vector<GroupHyper> groups) {
  EngineSettings settings;
  const MeshSpec mesh = mesh_of(config, ranks.world);
  const MeshPlace place(mesh, 0, ranks.world);
  settings.plan = plan_of(config.zero, {"dp"});
  settings.plan.residency = residency_of(config.offload);
  settings.plan.validate();
  settings.storage = storage_of(config.offload);
  settings.activations = activations_of(config.activations, config.offload);
  settings.budget = {.device_bytes = static_cast<std::uint64_t>(config.budget.device_bytes),
                     .host_bytes = static_cast<std::uint64_t>(config.budget.host_bytes),
                     .file_bytes = static_cast<std::uint64_t>(config.budget.file_bytes)};
  if (config.mesh.splits_models()) {
    settings.plan.axes = {"dp", "sp"};
    settings.mesh = mesh;
    settings.batch_axes = {"dp"};
    if (config.mesh.rows > 1) settings.plan.axes.insert(settings.plan.axes.begin() + 1, "rows");
    if (config.mesh.ep > 1) {
      settings.plan.axes.insert(settings.plan.axes.begin() + 1, std::string(kExpertAxis));
      settings.batch_axes.emplace_back(kExpertAxis);
    }
  }
  // A pipeline has other micro-batches between a forward and its backward: nothing is kept in between, or all of it for
  // the whole step.
  if (config.mesh.pp > 1) settings.plan.reshard = keeps_parameters(config) ? Reshard::kStep : Reshard::kAll;
  (void)settings.plan.degrees(place.size("dp") * config.mesh.ep * config.mesh.rows *
                              place.size("sp"));  // an error now, and not in the engine
  settings.micro_steps = micro_steps_of(config, ranks.world);
  settings.gradient_clipping = config.gradient_clipping;
  settings.update = {.inside_backward = config.update.inside_backward,
                     .clip_by = config.update.clip_by == "previous_norm" ? ClipBy::kPreviousNorm : ClipBy::kExact,
                     .delayed_after = config.update.delayed_after,
                     .rounds_sums = config.update.round_sums};
  settings.groups = std::move(groups);
  settings.optimizer = {
      .type = config.optimizer.rule(),
      .momentum = std::ranges::any_of(settings.groups, [](const GroupHyper& group) { return group.momentum != 0.0; }),
      .freeze_step = config.optimizer.freeze_step,
      .freeze_threshold = config.optimizer.freeze_threshold,
      .compression = config.optimizer.compression,
      .lamb = config.optimizer.lamb,
      .zero_one = config.optimizer.zero_one};
  settings.schedule = config.scheduler.schedule();
  settings.loss_scaling = config.fp16;
  settings.max_nonfinite_steps = config.runtime.max_nonfinite_steps;
  settings.uneven = config.runtime.uneven;
  settings.compare_replicas = config.runtime.compare_replicas;
  settings.stragglers = config.runtime.stragglers;
  settings.threads =
      config.runtime.threads > 0 ? config.runtime.threads : std::max(1, cores_of_this_rank(ranks.on_host));
  settings.memory_limit_bytes = static_cast<std::uint64_t>(config.runtime.memory_limit_bytes);
  settings.configuration = config.shared_json();
  return settings;
}

CommOptions make_comm_options(const Config& config, int world) {
  CommOptions options;
  const int per_node = config.runtime.ranks_per_node;
  for (int rank = 0; per_node > 0 && rank < world; ++rank) options.nodes.push_back(rank / per_node);
  options.reduction = config.runtime.reduction;
  options.check_calls = config.runtime.check_calls;
  options.link_bytes_per_s = config.runtime.link_bytes_per_s;
  options.timeout = Milliseconds(config.runtime.timeout_ms);
  options.first_timeout = Milliseconds(config.runtime.first_timeout_ms);
  options.frozen_after = Milliseconds(config.runtime.frozen_after_ms);
  options.end_stuck_after = Milliseconds(config.runtime.end_stuck_after_ms);
  return options;
}

}  // namespace zeroth
