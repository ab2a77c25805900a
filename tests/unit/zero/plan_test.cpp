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
    bool gathers_parameters, gathers_gradients;
  };
  const Row table[] = {{P::kReplicate, P::kReplicate, P::kReplicate, false, true},
                       {P::kReplicate, P::kPartial, P::kFlat, false, false},
                       {P::kReplicate, P::kFlat, P::kFlat, false, false},
                       {P::kFlat, P::kFlat, P::kFlat, true, false}};
  for (int stage = 0; stage < 4; ++stage) {
    const ShardingPlan plan = zero_plan(stage, {"dp", "sp"});
    const Row& row = table[stage];
    EXPECT_EQ(plan.name, "zero-" + std::to_string(stage));
    EXPECT_EQ(plan.axes, (std::vector<std::string>{"dp", "sp"}));
    EXPECT_EQ(plan.parameter, row.parameter) << stage;
    EXPECT_EQ(plan.gradient, row.gradient) << stage;
    EXPECT_EQ(plan.optimizer, row.optimizer) << stage;
    EXPECT_EQ(plan.gathers_parameters(), row.gathers_parameters) << stage;
    EXPECT_EQ(plan.gathers_gradients(4), row.gathers_gradients) << stage;
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
    EXPECT_EQ(plan.holds_all_buckets(1), stage < 2) << stage << ": one micro-step is one reduction under both policies";
  }
}

TEST(ShardingPlan, ValidateAllowsExactlyTheMeaningfulCombinations) {
  int allowed = 0;
  for (const P parameter : {P::kReplicate, P::kPartial, P::kFlat}) {
    for (const P gradient : {P::kReplicate, P::kPartial, P::kFlat}) {
      for (const P optimizer : {P::kReplicate, P::kPartial, P::kFlat}) {
        const ShardingPlan plan{.name = "made", .parameter = parameter, .gradient = gradient, .optimizer = optimizer};
        bool sensible = parameter != P::kPartial && optimizer != P::kPartial;
        if (optimizer == P::kReplicate) sensible = sensible && gradient == P::kReplicate && parameter == P::kReplicate;
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

TEST(ShardingPlan, DegreesOfTheStagesAreOneOrTheWorld) {
  EXPECT_EQ(zero_plan(0, {"dp"}).degrees(6),
            (Degrees{.parameter = 1, .gradient = 6, .sums = 1, .optimizer = 1, .world = 6}));
  EXPECT_EQ(zero_plan(1, {"dp"}).degrees(6),
            (Degrees{.parameter = 1, .gradient = 6, .sums = 6, .optimizer = 6, .world = 6}));
  EXPECT_EQ(zero_plan(2, {"dp"}).degrees(6),
            (Degrees{.parameter = 1, .gradient = 6, .sums = 6, .optimizer = 6, .world = 6}));
  EXPECT_EQ(zero_plan(3, {"dp"}).degrees(6),
            (Degrees{.parameter = 6, .gradient = 6, .sums = 6, .optimizer = 6, .world = 6}));
}

TEST(ShardingPlan, PlansForSlowLinksAreDegrees) {
  for (const ShardingPlan& plan : {hsdp_plan(2, {"dp"}), mics_plan(2, {"dp"})}) {
    EXPECT_EQ(plan.degrees(8), (Degrees{.parameter = 2, .gradient = 8, .sums = 2, .optimizer = 2, .world = 8}))
        << plan.name;
    EXPECT_TRUE(plan.gathers_parameters() && plan.gathers_gradients(8)) << plan.name;
  }
  ShardingPlan mics = mics_plan(2, {"dp"});
  mics.name = hsdp_plan(2, {"dp"}).name;
  EXPECT_EQ(mics, hsdp_plan(2, {"dp"}));
  const ShardingPlan hpz = hpz_plan(2, {"dp"});
  EXPECT_EQ(hpz.degrees(8), (Degrees{.parameter = 2, .gradient = 8, .sums = 8, .optimizer = 8, .world = 8}));
  EXPECT_TRUE(hpz.gathers_parameters() && !hpz.gathers_gradients(8));
  EXPECT_EQ(hpz.name, "hpz-2");
  EXPECT_EQ(hsdp_plan(4, {"dp"}).name, "hsdp-4");
  EXPECT_EQ(mics_plan(4, {"dp"}).name, "mics-4");
  // On as many ranks as the group has they are stage 3.
  EXPECT_EQ(hsdp_plan(4, {"dp"}).degrees(4), zero_plan(3, {"dp"}).degrees(4));
  EXPECT_EQ(hpz_plan(4, {"dp"}).degrees(4), zero_plan(3, {"dp"}).degrees(4));
  for (const int group : {0, -1}) {
    EXPECT_THROW((void)hsdp_plan(group, {"dp"}), Error);
    EXPECT_THROW((void)mics_plan(group, {"dp"}), Error);
    EXPECT_THROW((void)hpz_plan(group, {"dp"}), Error);
  }
}

TEST(ShardingPlan, DegreesThatDoNotNestInTheWorldAreConfigurationErrors) {
  struct Case {
    int parameter, optimizer, world;
  };
  for (const auto& [parameter, optimizer, world] :
       {Case{3, 0, 4}, {2, 3, 6}, {4, 2, 8}, {8, 8, 4}, {2, 6, 8}, {0, 2, 4}}) {
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.parameter_degree = parameter;
    plan.optimizer_degree = optimizer;
    try {
      (void)plan.degrees(world);
      ADD_FAILURE() << parameter << " " << optimizer << " " << world;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_EQ(error.context().which, "zero-3");
      EXPECT_NE(error.context().expected.find(std::to_string(world) + " ranks"), std::string::npos);
    }
  }
}

TEST(ShardingPlan, GradientsHaveADegreeUnderEveryPlacement) {
  for (const int stage : {0, 1, 2, 3}) {
    ShardingPlan plan = zero_plan(stage, {"dp"});
    EXPECT_FALSE(plan.degrees(8).sums_groups()) << stage;
    EXPECT_EQ(plan.shares_sums(8), stage == 0) << stage;
    plan.gradient_degree = 2;
    EXPECT_NO_THROW(plan.validate());
    EXPECT_EQ(plan.degrees(8).gradient, 2) << stage;
    EXPECT_TRUE(plan.degrees(8).sums_groups() && plan.shares_sums(8)) << stage;
    plan.gradient_degree = 8;
    EXPECT_EQ(plan.degrees(8), zero_plan(stage, {"dp"}).degrees(8)) << stage;
  }
  // Between the others, below or above them: one of each two divides the other.
  for (const int degree : {1, 2, 4, 8}) {
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.parameter_degree = 2;
    plan.optimizer_degree = 4;
    plan.gradient_degree = degree;
    EXPECT_EQ(plan.degrees(8).gradient, degree);
  }
  struct Case {
    int parameter, optimizer, gradient, world;
  };
  for (const auto& [parameter, optimizer, gradient, world] :
       {Case{0, 0, 3, 8}, {0, 0, 16, 8}, {2, 2, 3, 6}, {3, 6, 2, 6}, {2, 4, 3, 12}, {4, 12, 6, 12}}) {
    ShardingPlan plan = zero_plan(3, {"dp"});
    plan.parameter_degree = parameter;
    plan.optimizer_degree = optimizer;
    plan.gradient_degree = gradient;
    try {
      (void)plan.degrees(world);
      ADD_FAILURE() << parameter << " " << optimizer << " " << gradient << " " << world;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kConfig);
      EXPECT_EQ(error.context().got, std::to_string(gradient));
      EXPECT_NE(error.context().hint.find("zeroth.gradient_degree"), std::string::npos);
    }
  }
  ShardingPlan plan = zero_plan(3, {"dp"});
  plan.gradient_degree = -1;
  EXPECT_THROW(plan.validate(), Error);
}

TEST(ShardingPlan, DegreesNeedShardedStates) {
  ShardingPlan plan = zero_plan(2, {"dp"});
  plan.optimizer_degree = 2;
  EXPECT_NO_THROW(plan.validate());
  plan.parameter_degree = 2;
  EXPECT_THROW(plan.validate(), Error) << "parameters are replicated";
  plan = zero_plan(0, {"dp"});
  plan.optimizer_degree = 2;
  EXPECT_THROW(plan.validate(), Error) << "the optimizer is replicated";
  plan = zero_plan(3, {"dp"});
  plan.gradient = P::kReplicate;
  EXPECT_NO_THROW(plan.validate());
  plan.parameter_degree = 2;
  EXPECT_THROW(plan.validate(), Error) << "gradients are replicated";
  plan = zero_plan(3, {"dp"});
  plan.optimizer_degree = -2;
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
