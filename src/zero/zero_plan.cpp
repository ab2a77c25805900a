#include "zero/coded_calls.h"

#include <zeroth/base/error.h>
#include <zeroth/shard/flat_layout.h>
#include <zeroth/zero/plan.h>

#include <algorithm>
#include <functional>

namespace zeroth {

std::string_view name_of(ReductionPolicy policy) noexcept {
  return policy == ReductionPolicy::kPerStep ? "per_step" : "per_micro_step";
}

std::string_view name_of(Reshard reshard) noexcept {
  switch (reshard) {
    case Reshard::kDefault:
      return "default";
    case Reshard::kAll:
      return "all";
    case Reshard::kNone:
      return "none";
    case Reshard::kStep:
      return "step";
  }
  return "default";
}

void ShardingPlan::validate() const {
  const auto refuse = [this](const char* text) {
    throw Error(ErrorCode::kUsage, text,
                {.where = "zero.plan",
                 .which = name,
                 .got = "parameter " + std::string(name_of(parameter)) + ", gradient " +
                        std::string(name_of(gradient)) + ", optimizer " + std::string(name_of(optimizer))});
  };
  if (parameter == Placement::kPartial || optimizer == Placement::kPartial) {
    refuse("only gradients can be partial sums");
  }
  if (optimizer == Placement::kReplicate && gradient != Placement::kReplicate) {
    refuse("a replicated optimizer needs replicated gradients");
  }
  if (parameter == Placement::kFlat && optimizer != Placement::kFlat) {
    refuse("sharded parameters need a sharded optimizer");
  }
  if (parameter_degree != 0 && parameter != Placement::kFlat) refuse("a degree of parameters that are not sharded");
  if (optimizer_degree != 0 && optimizer != Placement::kFlat) refuse("a degree of an optimizer that is not sharded");
  if (parameter_degree + optimizer_degree != 0 && gradient == Placement::kReplicate) {
    refuse("degrees of sharding beside replicated gradients");
  }
  ZR_CHECK(parameter_degree >= 0 && optimizer_degree >= 0 && gradient_degree >= 0, ErrorCode::kUsage,
           "a degree of sharding is negative", {.which = name});
  const bool bits = (codes.parameter_bits == 0 || codes.parameter_bits == 8) &&
                    (codes.gradient_bits == 0 || codes.gradient_bits == 4 || codes.gradient_bits == 8);
  ZR_CHECK(bits && codes.block >= 16 && codes.block <= kBlockElements && codes.block % 16 == 0 &&
               kBlockElements % codes.block == 0 && codes.node_degree >= 0,
           ErrorCode::kUsage, "numbers cannot travel in such codes",
           {.where = "zero.plan",
            .which = name,
            .expected = "8 bits for parameters, 8 or 4 for gradients, blocks of 16 to 1024 elements that divide 1024",
            .got = std::to_string(codes.parameter_bits) + " and " + std::to_string(codes.gradient_bits) +
                   " bits, blocks of " + std::to_string(codes.block)});
  if (codes.parameter_bits > 0 && parameter != Placement::kFlat) refuse("codes of parameters that are not gathered");
  ZR_CHECK(ring_slots >= 1 && ring_slots <= 4096, ErrorCode::kUsage, "ring_slots must be 1 to 4096", {.which = name});
  ZR_CHECK(
      residency.slots >= 2 && residency.slots <= 4096 && residency.block_elements >= kBlockElements &&
          residency.block_elements % kBlockElements == 0 && residency.block_elements <= std::int64_t{1} << 30U &&
          residency.optimizer_ratio >= 0.0 && residency.optimizer_ratio <= 1.0 && residency.cache_blocks >= 0 &&
          residency.parameter_elements >= 0,
      ErrorCode::kUsage, "states cannot rest in such blocks",
      {.where = "zero.plan",
       .which = name,
       .expected =
           "2 to 4096 slots, blocks of 1024 to 2^30 elements in multiples of 1024, a ratio from 0 to 1, a cache of 0 "
           "blocks or more",
       .got = std::to_string(residency.slots) + " slots, " + std::to_string(residency.block_elements) +
              " elements, ratio " + std::to_string(residency.optimizer_ratio) + ", a cache of " +
              std::to_string(residency.cache_blocks)});
  ZR_CHECK(prefetch_units >= 0, ErrorCode::kUsage, "prefetch_units must not be negative", {.which = name});
}

std::vector<int> Degrees::path(int from, int to) const {
  std::vector<int> steps{from};
  for (const int degree : {parameter, gradient, optimizer, node}) {
    if (to < degree && degree < from) steps.push_back(degree);
  }
  if (to < from) steps.push_back(to);
  std::ranges::sort(steps, std::greater{});
  steps.erase(std::unique(steps.begin(), steps.end()),
              steps.end());  // std::ranges::unique of libstdc++ 12 does not compile with clang 14
  return steps;
}

Degrees ShardingPlan::degrees(int world) const {
  const auto of = [world](Placement placement, int degree) {
    if (placement != Placement::kFlat) return 1;
    return degree == 0 ? world : degree;
  };
  Degrees states{.parameter = of(parameter, parameter_degree),
                 .gradient = gradient_degree == 0 ? world : gradient_degree,
                 .optimizer = of(optimizer, optimizer_degree),
                 .world = world};
  states.sums = gathers_into_buckets() ? 1 : states.optimizer;
  states.node = std::max(1, codes.node_degree);
  ZR_CHECK(world % states.node == 0, ErrorCode::kConfig, "ranks do not make whole nodes",
           {.where = "zero.plan",
            .which = name,
            .expected = "a divisor of the " + std::to_string(world) + " ranks",
            .got = "nodes of " + std::to_string(states.node),
            .hint = "the keys are zero_hpz_partition_size and zeroth.codes.node_degree"});
  ZR_CHECK(
      states.parameter <= states.optimizer && states.optimizer % states.parameter == 0 && world % states.optimizer == 0,
      ErrorCode::kConfig, "states cannot be split over so many ranks",
      {.where = "zero.plan",
       .which = name,
       .expected =
           "a degree of parameters that divides the optimizer's, which divides the " + std::to_string(world) + " ranks",
       .got = "parameters over " + std::to_string(states.parameter) + ", optimizer over " +
              std::to_string(states.optimizer),
       .hint = "the keys are zero_hpz_partition_size, mics_shard_size, zeroth.parameter_degree and "
               "zeroth.optimizer_degree"});
  // A part at one degree is a run of parts at the next one: of any two degrees one divides the other.
  const auto in_line = [](int a, int b) { return a % b == 0 || b % a == 0; };
  ZR_CHECK(world % states.gradient == 0 && in_line(states.gradient, states.parameter) &&
               in_line(states.gradient, states.optimizer),
           ErrorCode::kConfig, "gradients cannot be summed over so many ranks",
           {.where = "zero.plan",
            .which = name,
            .expected = "a divisor of the " + std::to_string(world) + " ranks that divides, or is a multiple of, " +
                        std::to_string(states.parameter) + " and " + std::to_string(states.optimizer) +
                        ", the degrees of parameters and optimizer",
            .got = std::to_string(states.gradient),
            .hint = "the key is zeroth.gradient_degree"});
  ZR_CHECK(in_line(states.node, states.parameter) && in_line(states.node, states.optimizer) &&
               in_line(states.node, states.gradient),
           ErrorCode::kConfig, "numbers in codes cannot go along such nodes",
           {.where = "zero.plan",
            .which = name,
            .expected = "a number of ranks that divides, or is a multiple of, " + std::to_string(states.parameter) +
                        ", " + std::to_string(states.gradient) + " and " + std::to_string(states.optimizer) +
                        ", the degrees of parameters, gradients and optimizer",
            .got = "nodes of " + std::to_string(states.node),
            .hint = "the keys are zero_hpz_partition_size and zeroth.codes.node_degree"});
  // The gather in codes is one call over the far ranks, so no degree may lie inside of it.
  const CodeHop far = hop_of_parameters(states);
  ZR_CHECK(codes.parameter_bits == 0 || states.path(far.from, far.to).size() <= 2, ErrorCode::kConfig,
           "a degree lies inside of the gather of parameters in codes",
           {.where = "zero.plan",
            .which = name,
            .expected = "no degree of gradients or of the optimizer between " + std::to_string(far.to) + " and " +
                        std::to_string(far.from),
            .got = std::to_string(states.gradient) + " and " + std::to_string(states.optimizer),
            .hint = "set zero_hpz_partition_size to zeroth.gradient_degree"});
  return states;
}

ShardingPlan zero_plan(int zero_stage, std::vector<std::string> axes) {
  ZR_CHECK(zero_stage >= 0 && zero_stage <= 3, ErrorCode::kConfig, "there is no such ZeRO stage",
           {.which = "zero_optimization.stage", .expected = "0, 1, 2 or 3", .got = std::to_string(zero_stage)});
  ShardingPlan plan;
  plan.name = "zero-" + std::to_string(zero_stage);
  plan.axes = std::move(axes);
  if (zero_stage >= 1) {
    plan.gradient = Placement::kPartial;
    plan.optimizer = Placement::kFlat;
  }
  if (zero_stage >= 2) plan.gradient = Placement::kFlat;
  if (zero_stage >= 3) plan.parameter = Placement::kFlat;
  plan.validate();
  return plan;
}

ShardingPlan hsdp_plan(int group, std::vector<std::string> axes) {
  ShardingPlan plan = hpz_plan(group, std::move(axes));
  plan.name = "hsdp-" + std::to_string(group);
  plan.optimizer_degree = group;
  return plan;
}

ShardingPlan mics_plan(int group, std::vector<std::string> axes) {
  ShardingPlan plan = hsdp_plan(group, std::move(axes));
  plan.name = "mics-" + std::to_string(group);
  return plan;
}

ShardingPlan hpz_plan(int group, std::vector<std::string> axes) {
  ZR_CHECK(group >= 1, ErrorCode::kConfig, "states cannot be split over so few ranks",
           {.where = "zero.plan", .expected = "groups of at least one rank", .got = std::to_string(group)});
  ShardingPlan plan = zero_plan(3, std::move(axes));
  plan.name = "hpz-" + std::to_string(group);
  plan.parameter_degree = group;
  plan.validate();
  return plan;
}

std::vector<ShardingPlan> all_zero_plans(const std::vector<std::string>& axes) {
  std::vector<ShardingPlan> plans;
  for (int zero_stage : {0, 1, 2, 3}) plans.push_back(zero_plan(zero_stage, axes));
  return plans;
}

}  // namespace zeroth
