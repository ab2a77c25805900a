#include "doctor/advice.h"

#include "doctor/units.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/zero/memory_plan.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

constexpr int kAdamStates = 2;
constexpr std::int64_t kColumns = 1024;

/// A model of this size as the engine sees one: matrices, because gradients of matrices travel in their own dtype.
ModelLayout layout_of(const ModelSize& model, const Degrees& degrees) {
  const int units = model.layers + 1;
  const auto rows =
      static_cast<std::int64_t>(std::max(1.0, std::round(model.params / units / static_cast<double>(kColumns))));
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> specs;
  for (int unit = 0; unit < units; ++unit) {
    const std::string name = unit == 0 ? "embedding" : fmt::format("layers.{}", unit - 1);
    params.push_back({.name = name + ".weight", .shape = {rows, kColumns}, .dtype = model.dtype});
    specs.push_back({.name = name, .params = {unit}, .repeated = unit > 0});
  }
  return make_model_layout(std::move(params), std::move(specs), degrees);
}

void add_times(PlanCost& cost, const Cluster& cluster) {
  cost.seconds = 0;
  if (cluster.ranks_per_host > 1) cost.seconds += static_cast<double>(cost.near_bytes) / cluster.near_bytes_per_s;
  if (cluster.hosts > 1)
    cost.seconds += static_cast<double>(cost.far_bytes) * cluster.ranks_per_host / cluster.far_bytes_per_s;
  cost.fits = cost.memory_bytes <= cluster.bytes_per_host / static_cast<std::uint64_t>(cluster.ranks_per_host);
}

PlanCost cost_of(const ShardingPlan& plan, std::string keys, const ModelSize& model, const Cluster& cluster,
                 std::span<const StateDeclaration> states) {
  const int world = cluster.hosts * cluster.ranks_per_host;
  const ModelLayout layout = layout_of(model, plan.degrees(world));
  const NodeLevels nodes{
      .node_sizes = std::vector<int>(static_cast<std::size_t>(cluster.hosts), cluster.ranks_per_host),
      .two_levels = true};
  PlanCost cost{.name = plan.name, .keys = std::move(keys), .splits_parameters = plan.gathers_parameters()};
  cost.memory_bytes = plan_memory(layout, plan, 0, states, model.micro_steps).total();
  const std::uint64_t all = plan_wire(layout, plan, 0, model.micro_steps).total();
  cost.far_bytes = cluster.hosts > 1 ? plan_far_wire(layout, plan, 0, model.micro_steps, nodes).total() : 0;
  // What crosses as a sum is wider than what it is the sum of.
  cost.near_bytes = all - std::min(all, cost.far_bytes);
  add_times(cost, cluster);
  return cost;
}

/// ZeRO++ at a stage, with the hosts as its nodes.
PlanCost cost_in_codes(int stage, const ModelSize& model, const Cluster& cluster) {
  ShardingPlan plan = zero_plan(stage, {"dp"});
  plan.name = stage == 3 ? "zero++" : fmt::format("zero-{}-qg", stage);
  plan.codes = {.parameter_bits = stage == 3 ? 8 : 0,
                .gradient_bits = 4,
                .node_degree = cluster.ranks_per_host > 1 ? cluster.ranks_per_host : 0};
  std::string keys = fmt::format("\"zero_optimization\": {{\"stage\": {}, \"zero_quantized_gradients\": true", stage);
  if (stage == 3) keys += ", \"zero_quantized_weights\": true";
  if (stage == 3 && plan.codes.node_degree > 1)
    keys += fmt::format(", \"zero_hpz_partition_size\": {}", plan.codes.node_degree);
  keys += "}";
  if (stage != 3 && plan.codes.node_degree > 1)
    keys += fmt::format(", \"zeroth\": {{\"codes\": {{\"node_degree\": {}}}}}", plan.codes.node_degree);
  std::vector<StateDeclaration> states = element_states(kAdamStates);
  states.push_back({.name = "reduction_error", .shape = StateShape::kRank});
  return cost_of(plan, std::move(keys), model, cluster, states);
}

/// A step in which the ranks exchange signs of momenta, at stage 0: above it parameters travel as they are.
PlanCost cost_in_signs(const ModelSize& model, const Cluster& cluster) {
  const std::vector<StateDeclaration> states{{.name = "exp_avg", .shape = StateShape::kReplica},
                                             {.name = "exp_avg_sq"},
                                             {.name = "worker_error", .shape = StateShape::kRank},
                                             {.name = "server_error", .shape = StateShape::kPiece}};
  ShardingPlan plan = zero_plan(0, {"dp"});
  plan.holds_messages = true;
  PlanCost cost = cost_of(plan, "\"optimizer\": {\"type\": \"OneBitAdam\"}", model, cluster, states);
  cost.name = "1-bit Adam";
  const double world = cluster.hosts * cluster.ranks_per_host;
  const double both_ways = 2.0 * model.params / 8.0 / world;
  cost.far_bytes = static_cast<std::uint64_t>(both_ways * (world - cluster.ranks_per_host));
  cost.near_bytes = static_cast<std::uint64_t>(both_ways * (cluster.ranks_per_host - 1));
  add_times(cost, cluster);
  return cost;
}

void choose_lossy(Advice& advice, double compute_s) {
  if (!advice.chosen || compute_s <= 0 || advice.plans[*advice.chosen].seconds <= compute_s) return;
  for (std::size_t i = 0; i < advice.lossy.size(); ++i) {
    const PlanCost& method = advice.lossy[i];
    if (!method.fits || (advice.lossy_chosen && method.seconds >= advice.lossy[*advice.lossy_chosen].seconds)) continue;
    advice.lossy_chosen = i;
    if (method.seconds <= compute_s) return;
  }
}

void check(bool holds, const char* which, const std::string& expected, const std::string& got) {
  ZR_CHECK(holds, ErrorCode::kUsage, "a size that no plan can be made for",
           {.where = "zeroth doctor", .which = which, .expected = expected, .got = got});
}

void check(const ModelSize& model, const Cluster& cluster) {
  check(model.params >= 1e6 && model.params <= 1e14, "--params", "1e6 to 1e14", fmt::format("{}", model.params));
  check(model.layers >= 1 && model.layers <= 4096, "--layers", "1 to 4096", std::to_string(model.layers));
  check(model.micro_steps >= 1 && model.micro_steps <= 1'000'000, "--micro-steps", "1 to 1000000",
        std::to_string(model.micro_steps));
  check(is_trained(model.dtype), "--dtype", "fp32, fp64, bf16 or fp16", "another one");
  check(cluster.hosts >= 1 && cluster.ranks_per_host >= 1 && cluster.hosts <= 4096 / cluster.ranks_per_host, "ranks",
        "1 to 4096", fmt::format("{} on {} hosts", cluster.ranks_per_host, cluster.hosts));
  const auto usable = [](double rate) { return std::isfinite(rate) && rate > 0; };
  check(cluster.ranks_per_host == 1 || usable(cluster.near_bytes_per_s), "links inside a host", "a bandwidth", "none");
  check(cluster.hosts == 1 || usable(cluster.far_bytes_per_s), "links between hosts", "a bandwidth", "none");
  check(std::isfinite(cluster.compute_s) && cluster.compute_s >= 0, "--compute-seconds", "0 or more",
        fmt::format("{}", cluster.compute_s));
}

void choose(Advice& advice, double compute_s) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::array<double, 2> fastest{kNever, kNever};  // of plans that do not split parameters, and of those that do
  for (const PlanCost& plan : advice.plans) {
    double& best = fastest[plan.splits_parameters ? 1 : 0];
    if (plan.fits) best = std::min(best, compute_s + plan.seconds);
  }
  const bool splits = fastest[1] <= kWorthSplitting * fastest[0];
  for (std::size_t i = 0; i < advice.plans.size(); ++i) {
    const PlanCost& plan = advice.plans[i];
    if (!plan.fits || plan.splits_parameters != splits ||
        compute_s + plan.seconds > kWorthItsMemory * fastest[splits ? 1 : 0])
      continue;
    if (!advice.chosen || plan.memory_bytes < advice.plans[*advice.chosen].memory_bytes) advice.chosen = i;
  }
}

}  // namespace

Advice advise(const ModelSize& model, const Cluster& cluster) {
  check(model, cluster);
  const std::vector<std::string> axes{"dp"};
  struct Candidate {
    ShardingPlan plan;
    std::string keys;
  };
  std::vector<Candidate> candidates;
  for (const ShardingPlan& plan : all_zero_plans(axes)) {
    candidates.push_back({plan, fmt::format("\"zero_optimization\": {{\"stage\": {}}}", candidates.size())});
  }
  if (cluster.hosts > 1 && cluster.ranks_per_host > 1) {
    const int group = cluster.ranks_per_host;
    candidates.push_back(
        {hpz_plan(group, axes),
         fmt::format("\"zero_optimization\": {{\"stage\": 3, \"zero_hpz_partition_size\": {}}}", group)});
    // HSDP and MiCS are one plan here.
    candidates.push_back({hsdp_plan(group, axes),
                          fmt::format("\"zero_optimization\": {{\"stage\": 3, \"mics_shard_size\": {}}}", group)});
    // With gradients split as well: summed inside the hosts until the last micro-step.
    const std::size_t without = model.micro_steps > 1 ? candidates.size() : 0;
    for (std::size_t i = 0; i < without; ++i) {
      Candidate candidate = candidates[i];
      if (candidate.plan.gradient != Placement::kFlat) continue;
      candidate.plan.gradient_degree = group;
      candidate.plan.name += fmt::format("-g{}", group);
      candidate.keys += fmt::format(", \"zeroth\": {{\"gradient_degree\": {}}}", group);
      candidates.push_back(std::move(candidate));
    }
  }
  Advice advice;
  for (const Candidate& candidate : candidates)
    advice.plans.push_back(cost_of(candidate.plan, candidate.keys, model, cluster, element_states(kAdamStates)));
  choose(advice, cluster.compute_s);
  if (cluster.hosts > 1) {
    for (const int stage : {2, 3}) advice.lossy.push_back(cost_in_codes(stage, model, cluster));
    advice.lossy.push_back(cost_in_signs(model, cluster));
    choose_lossy(advice, cluster.compute_s);
  }
  return advice;
}

std::vector<std::string> describe(const Advice& advice, const ModelSize& model, const Cluster& cluster) {
  std::vector<std::string> lines;
  std::string links = cluster.ranks_per_host > 1
                          ? fmt::format("inside a host {} for each rank", rate_text(cluster.near_bytes_per_s))
                          : "one rank on each host";
  if (cluster.hosts > 1) links += fmt::format(", between hosts {} for each host", rate_text(cluster.far_bytes_per_s));
  lines.push_back(fmt::format("{:.3g} parameters in {}, {} ranks on {} host{}, {} micro-step{}; {}; {} on each host",
                              model.params, name_of(model.dtype), cluster.hosts * cluster.ranks_per_host, cluster.hosts,
                              cluster.hosts > 1 ? "s" : "", model.micro_steps, model.micro_steps > 1 ? "s" : "", links,
                              format_bytes(cluster.bytes_per_host)));
  lines.push_back(
      fmt::format("{:<12}{:>14}{:>16}{:>16}{:>16}", "plan", "memory/rank", "inside/step", "between/step", "time/step"));
  const auto add_table = [&lines](const std::vector<PlanCost>& plans, const std::optional<std::size_t>& chosen) {
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const PlanCost& plan = plans[i];
      lines.push_back(fmt::format("{:<12}{:>14}{:>16}{:>16}{:>16}{}", plan.name, format_bytes(plan.memory_bytes),
                                  format_bytes(plan.near_bytes), format_bytes(plan.far_bytes),
                                  seconds_text(plan.seconds),
                                  !plan.fits    ? "  does not fit"
                                  : chosen == i ? "  <- proposed"
                                                : ""));
    }
  };
  add_table(advice.plans, advice.chosen);
  if (!advice.chosen) {
    lines.emplace_back("no plan fits the memory of these hosts: more hosts, or a smaller model");
    return lines;
  }
  const PlanCost& chosen = advice.plans[*advice.chosen];
  lines.push_back(fmt::format("proposed: {}, {{{}}}", chosen.name, chosen.keys));
  // The plan that people begin with, where it is another one.
  constexpr std::size_t kStage3 = 3;
  const PlanCost& flat = advice.plans[kStage3];
  if (*advice.chosen != kStage3) {
    const auto more = static_cast<std::int64_t>(chosen.memory_bytes) - static_cast<std::int64_t>(flat.memory_bytes);
    lines.push_back(fmt::format("stage 3 over all ranks would spend {} of a step on links, {} {}{}",
                                seconds_text(flat.seconds), chosen.name + " spends " + seconds_text(chosen.seconds),
                                more < 0 ? "and takes less by " : "and takes more by ",
                                format_bytes(static_cast<std::uint64_t>(std::abs(more))) + " a rank"));
  }
  if (!advice.lossy_chosen) return lines;
  lines.push_back(
      fmt::format("{} would communicate for longer than a step computes ({}). Methods that change what is "
                  "trained (docs/slow-links.md), from the gentlest on:",
                  chosen.name, seconds_text(cluster.compute_s)));
  add_table(advice.lossy, advice.lossy_chosen);
  const PlanCost& lossy = advice.lossy[*advice.lossy_chosen];
  lines.push_back(fmt::format("for this link: {}, {{{}}}", lossy.name, lossy.keys));
  return lines;
}

}  // namespace zeroth::doctor
