#include <zeroth/base/error.h>
#include <zeroth/zero/plan.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth {
namespace {

using P = Placement;

TEST(ZeroPlan, StagesAreThesePlacements) {
  struct Row {
    P parameter, gradient, optimizer;
    bool gathers_parameters, publishes, gathers_gradients;
  };
  const Row table[] = {{P::kReplicate, P::kReplicate, P::kReplicate, false, false, true},
                       {P::kReplicate, P::kPartial, P::kFlat, false, true, false},
                       {P::kReplicate, P::kFlat, P::kFlat, false, true, false},
                       {P::kFlat, P::kFlat, P::kFlat, true, false, false}};
  for (int stage = 0; stage < 4; ++stage) {
    const ShardingPlan plan = zero_plan(stage, {"dp", "sp"});
    const Row& row = table[stage];
    EXPECT_EQ(plan.name, "zero-" + std::to_string(stage));
    EXPECT_EQ(plan.axes, (std::vector<std::string>{"dp", "sp"}));
    EXPECT_EQ(plan.parameter, row.parameter) << stage;
    EXPECT_EQ(plan.gradient, row.gradient) << stage;
    EXPECT_EQ(plan.optimizer, row.optimizer) << stage;
    EXPECT_EQ(plan.gathers_parameters(), row.gathers_parameters) << stage;
    EXPECT_EQ(plan.publishes_parameters(), row.publishes) << stage;
    EXPECT_EQ(plan.gathers_gradients(), row.gathers_gradients) << stage;
    EXPECT_NO_THROW(plan.validate());
  }
}

TEST(ZeroPlan, OtherStagesAreConfigurationErrors) {
  for (const int stage : {-1, 4, 100}) {
    try {
      (void)zero_plan(stage, {"dp"});
      ADD_FAILURE() << stage;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_EQ(error.context().got, std::to_string(stage));
    }
  }
}

TEST(ShardingPlan, BucketsAreHeldWhereAllLocalGradientsAre) {
  for (int stage = 0; stage < 4; ++stage) {
    ShardingPlan plan = zero_plan(stage, {"dp"});
    EXPECT_EQ(plan.holds_all_buckets(3), stage < 2) << stage;
    plan.policy = ReductionPolicy::kPerStep;
    EXPECT_TRUE(plan.holds_all_buckets(3)) << stage;
    EXPECT_EQ(plan.holds_all_buckets(1), stage < 2)
        << stage << ": one micro-step is one reduction under both policies";
  }
}

TEST(ShardingPlan, ValidateAllowsExactlyTheMeaningfulCombinations) {
  int allowed = 0;
  for (const P parameter : {P::kReplicate, P::kPartial, P::kFlat}) {
    for (const P gradient : {P::kReplicate, P::kPartial, P::kFlat}) {
      for (const P optimizer : {P::kReplicate, P::kPartial, P::kFlat}) {
        const ShardingPlan plan{
            .name = "made", .parameter = parameter, .gradient = gradient, .optimizer = optimizer};
        bool sensible = parameter != P::kPartial && optimizer != P::kPartial;
        if (optimizer == P::kReplicate)
          sensible = sensible && gradient == P::kReplicate && parameter == P::kReplicate;
        allowed += sensible ? 1 : 0;
        try {
          plan.validate();
          EXPECT_TRUE(sensible) << name_of(parameter) << name_of(gradient) << name_of(optimizer);
        } catch (const Error& error) {
          EXPECT_FALSE(sensible) << error.what();
          EXPECT_EQ(error.code(), ErrorCode::kUsage);
          EXPECT_EQ(error.context().which, "made");
        }
      }
    }
  }
  EXPECT_EQ(allowed, 7);
}

TEST(ShardingPlan, ValidateRefusesAbsurdNumbers) {
  for (const int slots : {0, -1, 4097}) {
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.ring_slots = slots;
    EXPECT_THROW(plan.validate(), Error) << slots;
  }
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.prefetch_units = -1;
  EXPECT_THROW(plan.validate(), Error);
}

TEST(PlanNames, AreThoseOfTheConfiguration) {
  EXPECT_EQ(name_of(ReductionPolicy::kPerMicroStep), "per_micro_step");
  EXPECT_EQ(name_of(ReductionPolicy::kPerStep), "per_step");
  EXPECT_EQ(name_of(Reshard::kDefault), "default");
  EXPECT_EQ(name_of(Reshard::kAll), "all");
  EXPECT_EQ(name_of(Reshard::kNone), "none");
}

}  // namespace
}  // namespace zeroth
