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
  const auto random = testing::any_model();
  const auto world = *rc::gen::inRange(1, 8);
  const auto micro_steps = *rc::gen::inRange(1, 4);
  const ShardingPlan plan = testing::any_plan();
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
  RC_ASSERT(sum.total() == expected.gather_parameters + expected.reduce_gradients +
                               expected.gather_gradients + expected.publish_parameters);
}

ModelLayout even_model(DType dtype, int world) {
  // Three equal repeated units and a root; every flat has a whole number of blocks on every rank.
  std::vector<ParamSpec> params;
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 4; ++unit) {
    params.push_back({.name = "w" + std::to_string(unit), .shape = {world * 2, 1024}, .dtype = dtype});
    units.push_back({.name = "u" + std::to_string(unit), .params = {unit}, .repeated = unit > 0});
  }
  return make_model_layout(params, units, world);
}

TEST(WirePlan, TwoAndThreeTimesTheModelInFloat32) {
  for (const int world : {1, 2, 3, 4, 7}) {
    const ModelLayout model = even_model(DType::kFloat32, world);
    const auto size = static_cast<std::uint64_t>(4 * world * 2 * 1024 * 4);
    const std::uint64_t share =
        size / static_cast<std::uint64_t>(world) * static_cast<std::uint64_t>(world - 1);
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
  EXPECT_EQ(plan_wire(model, plan, 1, 2).reduce_gradients, 4 * share) << "micro-steps are added in fp32 before they travel";
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

TEST(WirePlan, OneRankMovesNothing) {
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_EQ(plan_wire(even_model(DType::kFloat32, 1), zero_plan(stage, {"dp"}), 0, 3), WireBytes{});
  }
}

}  // namespace
}  // namespace zeroth
