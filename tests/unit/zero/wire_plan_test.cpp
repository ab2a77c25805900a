// plan_wire against the formulas of the literature: sum over flats of (gathers x parameter bytes + reductions
// x gradient bytes), times (n - 1) over all ranks, so (n - 1) / n of it on each where blocks divide evenly.
#include "random_model.h"

#include <zeroth/zero/memory_plan.h>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>
#include <vector>

namespace zeroth {
namespace {

WireBytes sum_over_ranks(const ModelLayout& model, const ShardingPlan& plan, int micro_steps) {
  WireBytes sum;
  for (int rank = 0; rank < model.world; ++rank) {
    const WireBytes wire = plan_wire(model, plan, rank, micro_steps);
    sum.gather_parameters += wire.gather_parameters;
    sum.reduce_gradients += wire.reduce_gradients;
    sum.gather_gradients += wire.gather_gradients;
    sum.publish_parameters += wire.publish_parameters;
  }
  return sum;
}

RC_GTEST_PROP(WirePlanProperty, SumOverRanksIsTheFormulaExactly, ()) {
  const auto random = test::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const auto micro_steps = *rc::gen::inRange(1, 4);
  const ShardingPlan plan = test::any_plan();
  const int stage = plan.name.back() - '0';
  const ModelLayout model = make_model_layout(random.params, random.units, world);

  int last_repeated = -1;
  for (std::size_t unit = 0; unit < random.units.size(); ++unit) {
    if (random.units[unit].repeated) last_repeated = static_cast<int>(unit);
  }
  const auto others = static_cast<std::uint64_t>(world - 1);
  const auto steps = static_cast<std::uint64_t>(micro_steps);
  WireBytes expected;
  for (const FlatLayout& flat : model.flats) {
    const auto length = static_cast<std::uint64_t>(flat.length);
    const std::uint64_t parameter = length * size_of(flat.dtype);
    const std::uint64_t sum = length * (flat.dtype == DType::kFloat64 ? 8 : 4);
    const bool repeated = random.units[static_cast<std::size_t>(flat.unit)].repeated;
    // As it is computed, unless it may be a sum, or its bucket takes sums.
    bool added = !repeated || stage == 0 || (plan.policy == ReductionPolicy::kPerStep && micro_steps > 1) || world == 1;
    for (const Segment& segment : flat.segments) {
      const ParamSpec& param = random.params[static_cast<std::size_t>(segment.param)];
      added = added || !param.aliases.empty() || (param.dtype == DType::kBFloat16 && param.shape.size() < 2);
    }
    const std::uint64_t gradient = added ? sum : parameter;
    bool kept = !repeated || (flat.unit == last_repeated && plan.ring_slots > 1);
    if (plan.reshard != Reshard::kDefault) kept = plan.reshard == Reshard::kNone;
    RC_ASSERT(keeps_gathered(model, plan, flat.unit) == kept);
    if (stage == 3) expected.gather_parameters += others * parameter * steps * (kept ? 1 : 2);
    if (!flat.trainable) continue;
    expected.reduce_gradients += others * gradient * (plan.policy == ReductionPolicy::kPerStep ? 1 : steps);
    if (stage == 0) expected.gather_gradients += others * sum;
    if (stage == 1 || stage == 2) expected.publish_parameters += others * parameter;
  }
  const WireBytes sum = sum_over_ranks(model, plan, micro_steps);
  RC_ASSERT(sum == expected);
  RC_ASSERT(sum.total() == expected.gather_parameters + expected.reduce_gradients + expected.gather_gradients +
                               expected.publish_parameters);
}

ModelLayout even_model(DType dtype, int world, int uses = 1) {
  // Three equal repeated units and a root; every flat has a whole number of blocks on every rank.
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 4; ++unit) {
    params.push_back({.name = "w" + std::to_string(unit), .shape = {world * 2, 1024}, .dtype = dtype});
    units.push_back({.name = "u" + std::to_string(unit), .params = {unit}, .repeated = unit > 0, .uses = uses});
  }
  return make_model_layout(params, units, world);
}

TEST(WirePlan, TwoAndThreeTimesTheModelInFloat32) {
  for (const int world : {1, 2, 3, 4, 7}) {
    const ModelLayout model = even_model(DType::kFloat32, world);
    const auto size = static_cast<std::uint64_t>(4 * world * 2 * 1024 * 4);
    const std::uint64_t share = size / static_cast<std::uint64_t>(world) * static_cast<std::uint64_t>(world - 1);
    for (int rank = 0; rank < world; ++rank) {
      for (const int stage : {0, 1, 2}) {
        EXPECT_EQ(plan_wire(model, zero_plan(stage, {"dp"}), rank, 1).total(), 2 * share) << stage;
      }
      ShardingPlan plan = zero_plan(3, {"dp"});
      plan.reshard = Reshard::kAll;
      EXPECT_EQ(plan_wire(model, plan, rank, 1).total(), 3 * share);
      plan.reshard = Reshard::kNone;
      EXPECT_EQ(plan_wire(model, plan, rank, 1).total(), 2 * share);
      plan.reshard = Reshard::kDefault;  // two of four units stay: half of a third is saved
      EXPECT_EQ(plan_wire(model, plan, rank, 1).total(), 2 * share + share / 2);
    }
  }
}

TEST(WirePlan, FourAndSixBytesAParameterInBFloat16) {
  const ModelLayout model = even_model(DType::kBFloat16, 4);
  const std::uint64_t unit = 4 * 2 * 1024 / 4 * 3;
  const std::uint64_t share = 4 * unit;
  const std::uint64_t root = 2 * unit;  // is not repeated: its gradients go in fp32
  EXPECT_EQ(plan_wire(model, zero_plan(1, {"dp"}), 0, 1).total(), 4 * share + root);
  EXPECT_EQ(plan_wire(model, zero_plan(2, {"dp"}), 3, 1).total(), 4 * share + root);
  EXPECT_EQ(plan_wire(model, zero_plan(0, {"dp"}), 3, 1).total(), 8 * share);  // gradients and sums in fp32
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.reshard = Reshard::kAll;
  EXPECT_EQ(plan_wire(model, plan, 1, 1).total(), 6 * share + root);
  plan.policy = ReductionPolicy::kPerStep;
  EXPECT_EQ(plan_wire(model, plan, 1, 1).total(), 6 * share + root);
  EXPECT_EQ(plan_wire(model, plan, 1, 2).reduce_gradients, 4 * share)
      << "micro-steps are added in fp32 before they travel";
}

TEST(WirePlan, MicroStepsMultiplyWhatHappensInEach) {
  const ModelLayout model = even_model(DType::kFloat32, 2);
  for (int stage = 0; stage < 4; ++stage) {
    ShardingPlan plan = zero_plan(stage, {"dp"});
    const WireBytes one = plan_wire(model, plan, 1, 1);
    const WireBytes three = plan_wire(model, plan, 1, 3);
    EXPECT_EQ(three.reduce_gradients, 3 * one.reduce_gradients);
    EXPECT_EQ(three.gather_parameters, 3 * one.gather_parameters);
    EXPECT_EQ(three.gather_gradients, one.gather_gradients);
    EXPECT_EQ(three.publish_parameters, one.publish_parameters);
    plan.policy = ReductionPolicy::kPerStep;
    EXPECT_EQ(plan_wire(model, plan, 1, 3).reduce_gradients, one.reduce_gradients);
  }
}

TEST(WirePlan, UnitsOfSeveralUsesAreGatheredForEach) {
  // u0 has a slot of its own, u1 to u3 are a ring. What stays for its backward is there for the use after it, too, but
  // in the ring others come between. Each use gives its unit back in backward.
  const auto gathers = [](Reshard reshard) {
    const ModelLayout model = even_model(DType::kFloat32, 2, /*uses=*/2);
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.reshard = reshard;
    std::vector<std::uint64_t> of_units;
    for (int unit = 0; unit < 4; ++unit) of_units.push_back(planned_gathers(model, plan, unit, 3));
    return of_units;
  };
  EXPECT_EQ(gathers(Reshard::kAll), (std::vector<std::uint64_t>{12, 12, 12, 12}));
  EXPECT_EQ(gathers(Reshard::kNone), (std::vector<std::uint64_t>{6, 6, 6, 6}));
  EXPECT_EQ(gathers(Reshard::kDefault), (std::vector<std::uint64_t>{6, 12, 12, 9}));
  EXPECT_EQ(gathers(Reshard::kStep), (std::vector<std::uint64_t>{1, 1, 1, 1}));
}

/// 8 ranks on two nodes, one flat of 4 MiB: units of an eighth of it.
constexpr std::uint64_t kEighth = 512U << 10U;

ModelLayout one_layer(const ShardingPlan& plan, DType dtype = DType::kFloat32) {
  return make_model_layout({{.name = "w", .shape = {1024, 1024}, .dtype = dtype}},
                           {{.name = "block", .params = {0}, .repeated = true}}, plan.degrees(8));
}

ShardingPlan resharding(ShardingPlan plan) {
  plan.reshard = Reshard::kAll;
  return plan;
}

TEST(WirePlan, DegreesMoveWhatTheyDoNotShare) {
  struct Row {
    ShardingPlan plan;
    WireBytes eighths;
  };
  ShardingPlan mixed = zero_plan(3, {"dp"});
  mixed.parameter_degree = 2;
  mixed.optimizer_degree = 4;
  const Row rows[] = {
      {zero_plan(3, {"dp"}), {.gather_parameters = 14, .reduce_gradients = 7}},
      {hsdp_plan(4, {"dp"}), {.gather_parameters = 12, .reduce_gradients = 7, .gather_gradients = 1}},
      {hpz_plan(4, {"dp"}), {.gather_parameters = 12, .reduce_gradients = 7, .publish_parameters = 1}},
      {hpz_plan(2, {"dp"}), {.gather_parameters = 8, .reduce_gradients = 7, .publish_parameters = 3}},
      {mixed, {.gather_parameters = 8, .reduce_gradients = 7, .gather_gradients = 1, .publish_parameters = 2}}};
  for (const Row& row : rows) {
    for (int rank = 0; rank < 8; ++rank) {
      const WireBytes wire = plan_wire(one_layer(row.plan), resharding(row.plan), rank, 1);
      EXPECT_EQ(wire.gather_parameters, row.eighths.gather_parameters * kEighth) << row.plan.name;
      EXPECT_EQ(wire.reduce_gradients, row.eighths.reduce_gradients * kEighth) << row.plan.name;
      EXPECT_EQ(wire.gather_gradients, row.eighths.gather_gradients * kEighth) << row.plan.name;
      EXPECT_EQ(wire.publish_parameters, row.eighths.publish_parameters * kEighth) << row.plan.name;
    }
  }
}

TEST(WirePlan, BetweenNodesStageThreeMovesThreeModelsAndHybridsTwo) {
  // With two levels a node of 4 ranks receives 4 x an eighth = half a model for each gather or reduction: M
  // (O-1)/O with O = 2.
  const NodeLevels levels{.node_sizes = {4, 4}, .two_levels = true};
  const auto far = [&levels](const ShardingPlan& plan, int micro_steps) {
    const WireBytes bytes = plan_far_wire(one_layer(plan), resharding(plan), 6, micro_steps, levels);
    for (int rank = 0; rank < 8; ++rank) {
      EXPECT_EQ(plan_far_wire(one_layer(plan), resharding(plan), rank, micro_steps, levels), bytes) << plan.name;
    }
    return bytes;
  };
  EXPECT_EQ(far(zero_plan(3, {"dp"}), 1), (WireBytes{.gather_parameters = 2 * kEighth, .reduce_gradients = kEighth}));
  EXPECT_EQ(far(hsdp_plan(4, {"dp"}), 1), (WireBytes{.reduce_gradients = kEighth, .gather_gradients = kEighth}));
  EXPECT_EQ(far(hpz_plan(4, {"dp"}), 1), (WireBytes{.reduce_gradients = kEighth, .publish_parameters = kEighth}));
  // Gathers inside a node cost nothing between nodes, however many micro-steps there are.
  EXPECT_EQ(far(zero_plan(3, {"dp"}), 3).total(), 9 * kEighth);
  EXPECT_EQ(far(hpz_plan(4, {"dp"}), 3).total(), 4 * kEighth);
  ShardingPlan once = hpz_plan(4, {"dp"});
  once.policy = ReductionPolicy::kPerStep;
  EXPECT_EQ(far(once, 3).total(), 2 * kEighth);
  // Two ranks have the whole: three other pairs have what a rank needs of the updates, two of them far away,
  // one its counterpart.
  EXPECT_EQ(far(hpz_plan(2, {"dp"}), 1), (WireBytes{.reduce_gradients = kEighth, .publish_parameters = kEighth}));
}

TEST(WirePlan, GradientsWithADegreeCrossBetweenNodesOnceAStep) {
  const NodeLevels levels{.node_sizes = {4, 4}, .two_levels = true};
  for (ShardingPlan plan : {zero_plan(1, {"dp"}), zero_plan(3, {"dp"}), hsdp_plan(4, {"dp"}), hpz_plan(4, {"dp"})}) {
    const auto near = [&](int micro_steps) {
      return plan_wire(one_layer(plan), resharding(plan), 6, micro_steps).reduce_gradients;
    };
    const auto far = [&](int micro_steps) {
      return plan_far_wire(one_layer(plan), resharding(plan), 6, micro_steps, levels).reduce_gradients;
    };
    EXPECT_EQ(near(3), 3 * 7 * kEighth) << plan.name;
    EXPECT_EQ(far(3), 3 * kEighth) << plan.name;
    plan.gradient_degree = 4;
    // A quarter from each of the three others of the node in each micro-step, and an eighth from the other node.
    EXPECT_EQ(near(3), 3 * 3 * 2 * kEighth + kEighth) << plan.name;
    EXPECT_EQ(far(3), kEighth) << plan.name;
    EXPECT_EQ(far(1), kEighth) << plan.name;
    plan.gradient_degree = 2;
    // A half from the other one of the pair, and an eighth from each of the three other pairs, of which two are far.
    EXPECT_EQ(near(3), 3 * 4 * kEighth + 3 * kEighth) << plan.name;
    EXPECT_EQ(far(3), kEighth) << plan.name << ": one sum of the other node's two pairs";
  }
  ShardingPlan narrow = resharding(hpz_plan(4, {"dp"}));
  narrow.gradient_degree = 4;
  EXPECT_EQ(plan_wire(one_layer(narrow, DType::kBFloat16), narrow, 0, 2).reduce_gradients, 2 * 3 * kEighth + kEighth)
      << "gradients travel narrow inside the node, their sums wide";
}

TEST(WirePlan, WithoutLevelsEveryFarRankIsAsked) {
  const NodeLevels flat{.node_sizes = {4, 4}};
  const auto far = [&flat](const ShardingPlan& plan) {
    return plan_far_wire(one_layer(plan), resharding(plan), 1, 1, flat);
  };
  EXPECT_EQ(far(zero_plan(3, {"dp"})), (WireBytes{.gather_parameters = 8 * kEighth, .reduce_gradients = 4 * kEighth}));
  EXPECT_EQ(far(hsdp_plan(4, {"dp"})), (WireBytes{.reduce_gradients = 4 * kEighth, .gather_gradients = kEighth}));
  EXPECT_EQ(far(hpz_plan(4, {"dp"})), (WireBytes{.reduce_gradients = 4 * kEighth, .publish_parameters = kEighth}));
  EXPECT_EQ(far(hpz_plan(2, {"dp"})), (WireBytes{.reduce_gradients = 4 * kEighth, .publish_parameters = 2 * kEighth}));
  // Groups that are larger than a node, or lie across two, are gathered from afar.
  const NodeLevels pairs{.node_sizes = {2, 2, 2, 2}};
  EXPECT_EQ(
      plan_far_wire(one_layer(hsdp_plan(4, {"dp"})), resharding(hsdp_plan(4, {"dp"})), 0, 1, pairs).gather_parameters,
      8 * kEighth);
  const NodeLevels odd{.node_sizes = {3, 5}};
  EXPECT_EQ(
      plan_far_wire(one_layer(hsdp_plan(4, {"dp"})), resharding(hsdp_plan(4, {"dp"})), 0, 1, odd).gather_parameters,
      4 * kEighth);
  EXPECT_EQ(
      plan_far_wire(one_layer(hsdp_plan(4, {"dp"})), resharding(hsdp_plan(4, {"dp"})), 7, 1, odd).gather_parameters,
      0U);
}

TEST(WirePlan, SumsOfNodesAreWideAndGradientsNarrow) {
  const ShardingPlan plan = resharding(hpz_plan(4, {"dp"}));
  const ModelLayout model = one_layer(plan, DType::kBFloat16);
  const WireBytes levels = plan_far_wire(model, plan, 0, 1, {.node_sizes = {4, 4}, .two_levels = true});
  EXPECT_EQ(levels, (WireBytes{.reduce_gradients = kEighth, .publish_parameters = kEighth / 2}));
  const WireBytes flat = plan_far_wire(model, plan, 0, 1, {.node_sizes = {4, 4}});
  EXPECT_EQ(flat, (WireBytes{.reduce_gradients = 4 * kEighth / 2, .publish_parameters = kEighth / 2}));
}

RC_GTEST_PROP(WirePlanProperty, AtAnyDegreesAGroupMovesItsPartsOnceAndNodesOfOneRankMakeAllOfItFar, ()) {
  const auto random = test::any_model();
  const auto parameter = *rc::gen::inRange(1, 4);
  const auto optimizer = parameter * *rc::gen::inRange(1, 4);
  const auto world = optimizer * *rc::gen::inRange(1, 4);
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.parameter_degree = parameter;
  plan.optimizer_degree = optimizer;
  plan.gradient_degree = *rc::gen::element(0, 1, parameter, optimizer);
  plan.narrow_buckets = *rc::gen::arbitrary<bool>();
  plan.reshard = Reshard::kAll;
  const ModelLayout model = make_model_layout(random.params, random.units, plan.degrees(world));
  const auto whole = [&model](bool trainable_only, bool sums) {
    std::uint64_t bytes = 0;
    for (const FlatLayout& flat : model.flats) {
      if (flat.trainable || !trainable_only) bytes += sums ? flat.accumulation_bytes() : flat.bytes();
    }
    return bytes;
  };
  const WireBytes sum = sum_over_ranks(model, plan, 1);
  const auto times = [](int count) { return static_cast<std::uint64_t>(count); };
  RC_ASSERT(sum.gather_parameters == 2 * whole(false, false) * times(world - world / parameter));
  RC_ASSERT(sum.gather_gradients == whole(true, true) * times(world / optimizer - 1));
  RC_ASSERT(sum.publish_parameters == whole(true, false) * times(world / parameter - world / optimizer));
  if (plan.gradient_degree != 0 && !plan.narrow_buckets) {
    const int runs = world / plan.gradient_degree;
    RC_ASSERT(sum.reduce_gradients == whole(true, true) * times(runs * (plan.gradient_degree - 1) + runs - 1));
  }
  const NodeLevels nodes{.node_sizes = std::vector<int>(static_cast<std::size_t>(world), 1),
                         .two_levels = *rc::gen::arbitrary<bool>()};
  for (int rank = 0; rank < world; ++rank) {
    RC_ASSERT(plan_far_wire(model, plan, rank, 1, nodes) == plan_wire(model, plan, rank, 1));
  }
}

TEST(WirePlan, OneNodeHasNoFarBytes) {
  for (const ShardingPlan& plan :
       {zero_plan(0, {"dp"}), zero_plan(3, {"dp"}), hsdp_plan(2, {"dp"}), hpz_plan(4, {"dp"})}) {
    for (const bool two_levels : {false, true}) {
      EXPECT_EQ(plan_far_wire(one_layer(plan), plan, 3, 2, {.node_sizes = {8}, .two_levels = two_levels}), WireBytes{})
          << plan.name;
    }
  }
}

TEST(WirePlan, OneRankMovesNothing) {
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(plan_wire(even_model(DType::kFloat32, 1), zero_plan(stage, {"dp"}), 0, 3), WireBytes{});
  }
}

}  // namespace
}  // namespace zeroth
