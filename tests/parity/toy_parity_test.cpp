// The stage changes memory, never numbers: the toy model on ranks that are threads, compared with ==.
#include "support/sanitizer.h"
#include "support/toy_training.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::testing {
namespace {

std::vector<ShardingPlan> all_plans(ReductionPolicy policy) {
  std::vector<ShardingPlan> plans;
  for (int stage = 0; stage <= 3; ++stage) {
    plans.push_back(zero_plan(stage, {"dp"}));
    if (stage < 3) continue;
    for (const Reshard reshard : {Reshard::kAll, Reshard::kNone}) {
      plans.push_back(zero_plan(stage, {"dp"}));
      plans.back().reshard = reshard;
      plans.back().name += "-" + std::string(name_of(reshard));
    }
  }
  for (ShardingPlan& plan : plans) plan.policy = policy;
  return plans;
}

struct Case {
  DType dtype;
  int world;
  int micro_steps;
  ReductionPolicy policy;
};

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  const Case& value = info.param;
  return std::string(name_of(value.dtype)) + "_world" + std::to_string(value.world) + "_accumulate" +
         std::to_string(value.micro_steps) + "_" + std::string(name_of(value.policy));
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const int world : {1, 2, 3, 4, 7}) {
      for (const int micro_steps : {1, 3}) {
        for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
          cases.push_back({dtype, world, micro_steps, policy});
        }
      }
    }
  }
  return cases;
}

class ToyParity : public ::testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] ToyTraining training() const {
    ToyTraining result{.reports_memory = false};
    result.model = {.width = 41, .blocks = 5, .dtype = GetParam().dtype};
    result.world = GetParam().world;
    result.micro_steps = GetParam().micro_steps;
    return result;
  }
  void expect_all_plans_equal(ToyTraining training) const {
    training.plan = zero_plan(0, {"dp"});
    training.plan.policy = GetParam().policy;
    const ToyOutcome expected = train_toy(training);
    for (const ShardingPlan& plan : all_plans(GetParam().policy)) {
      for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
        training.plan = plan;
        training.mode = mode;
        training.chaos_seed += 1;
        const ToyOutcome got = train_toy(training);
        EXPECT_EQ(difference(expected, got), "")
            << plan.name
            << (mode == ExecutionMode::kChaos ? " chaos seed " + std::to_string(training.chaos_seed) : " inline");
      }
    }
  }
};

TEST_P(ToyParity, PlainModel) {
  expect_all_plans_equal(training());
}

/// Buckets of 16 bits at stages 1 to 3, and wide ones where a gradient is a sum; with 32 bits at stage 0 they are the
/// same numbers.
TEST_P(ToyParity, GradientsOf16Bits) {
  if (GetParam().dtype != DType::kBFloat16) return;
  ToyTraining narrow = training();
  narrow.model.round_gradients = true;
  expect_all_plans_equal(narrow);
  narrow.model.wide_rank = GetParam().world / 2;
  narrow.model.reuse_last = true;
  narrow.model.tie_first_two = true;
  narrow.passes = 2;
  narrow.skip = [](int rank, std::int64_t pass, int block) { return (rank + block + pass) % 4 == 0; };
  expect_all_plans_equal(narrow);
}

TEST_P(ToyParity, ReusedTiedFrozenAndSkipped) {
  ToyTraining odd = training();
  odd.model.reuse_last = true;
  odd.model.tie_first_two = true;
  odd.model.frozen_blocks = {2};
  // Ranks take different paths; in some steps a block is skipped by everybody.
  odd.skip = [](int rank, std::int64_t step, int block) {
    return block > 0 && ((step + block) % 3 == 0 || (rank + block + step) % 4 == 0);
  };
  expect_all_plans_equal(odd);
}

/// Each message is a meeting of two threads: fewer ranks than above.
std::vector<Case> matched_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& value) { return value.world == 7; });
  return cases;
}

class MatchedParity : public ToyParity {
 protected:
  void expect_messages_give_the_same(ToyTraining training) const {
    training.plan.policy = GetParam().policy;
    training.transport = test::ThreadTransport::kMemory;
    training.mode = ExecutionMode::kInline;
    const ToyOutcome expected = train_toy(training);
    training.transport = test::ThreadTransport::kMessages;
    for (const ShardingPlan& plan : all_plans(GetParam().policy)) {
      for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
        training.plan = plan;
        training.mode = mode;
        training.chaos_seed += 1;
        EXPECT_EQ(difference(expected, train_toy(training)), "") << plan.name << " " << static_cast<int>(mode);
      }
    }
  }
};

TEST_P(MatchedParity, MatchedCallsGiveTheBitsOfSharedMemory) {
  ToyTraining odd = training();
  odd.model.reuse_last = true;
  odd.model.tie_first_two = true;
  odd.model.frozen_blocks = {2};
  odd.skip = [](int /*rank*/, std::int64_t step, int block) {
    return block > 0 && (step + block) % 3 == 0;
  };  // on all ranks alike
  expect_messages_give_the_same(odd);
}

TEST_P(MatchedParity, GradientsOf16BitsAndSumsOf32FromOneRankOrAll) {
  if (GetParam().dtype != DType::kBFloat16) return;
  ToyTraining narrow = training();
  narrow.model.round_gradients = true;
  narrow.passes = 2;
  expect_messages_give_the_same(narrow);
  narrow.model.reuse_last = true;
  expect_messages_give_the_same(narrow);
  narrow.model.wide_rank = 0;
  expect_messages_give_the_same(narrow);
}

/// A world of several nodes.
struct NodesCase {
  DType dtype;
  int world;
  int per_node;
  ReductionPolicy policy;
};

class NodesParity : public ::testing::TestWithParam<NodesCase> {};

/// Sums go along the nodes in every transport, so what crosses between them may be sums of nodes: shared memory that
/// knows of nodes, messages that do, and two levels give the same bits at every stage.
TEST_P(NodesParity, EveryTransportAndStageSumsAlongTheNodes) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 41, .blocks = 3, .dtype = dtype};
  training.model.reuse_last = true;
  training.model.tie_first_two = true;
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.world = world;
  training.micro_steps = 2;
  training.skip = [](int /*rank*/, std::int64_t step, int block) { return block > 0 && (step + block) % 3 == 0; };
  training.plan.policy = policy;
  const ToyOutcome flat = train_toy(training);
  training.per_node = per_node;
  const ToyOutcome expected = train_toy(training);
  EXPECT_NE(difference(flat, expected), "") << "the nodes take no part: this test could not fail";
  for (const test::ThreadTransport transport :
       {test::ThreadTransport::kMemory, test::ThreadTransport::kMessages, test::ThreadTransport::kLevels}) {
    for (const ShardingPlan& plan : all_plans(policy)) {
      training.transport = transport;
      training.plan = plan;
      training.mode = plan.name.size() % 2 == 0 ? ExecutionMode::kChaos : ExecutionMode::kInline;
      training.chaos_seed += 1;
      EXPECT_EQ(difference(expected, train_toy(training)), "")
          << plan.name << " transport " << static_cast<int>(transport);
    }
  }
}

/// A gradient that some ranks do not have is one of zeros, and no reason for them to come to other calls than the rest.
TEST_P(NodesParity, WhatSomeRanksLeaveOutIsZeroUnderEveryTransportAndStage) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 41, .blocks = 4, .dtype = dtype};
  training.model.tie_first_two = true;  // block 1 has nothing but the bias
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.world = world;
  training.per_node = per_node;
  training.micro_steps = 2;
  training.steps = 3;
  training.left_out = [](int rank, std::int64_t step, int block) { return rank > 0 && (rank + step + block) % 3 == 0; };
  training.plan.policy = policy;
  ToyTraining whole = training;
  whole.left_out = {};
  training.zeros_for_left_out = true;
  const ToyOutcome expected = train_toy(training);
  EXPECT_NE(difference(train_toy(whole), expected), "") << "nothing is left out: this test could not fail";
  training.zeros_for_left_out = false;
  for (const test::ThreadTransport transport :
       {test::ThreadTransport::kMemory, test::ThreadTransport::kMessages, test::ThreadTransport::kLevels}) {
    for (const ShardingPlan& plan : all_plans(policy)) {
      training.transport = transport;
      training.plan = plan;
      training.mode = plan.name.size() % 2 == 0 ? ExecutionMode::kChaos : ExecutionMode::kInline;
      training.chaos_seed += 1;
      EXPECT_EQ(difference(expected, train_toy(training)), "")
          << plan.name << " transport " << static_cast<int>(transport);
    }
  }
}

/// Every chain of degrees that a world has, with parameters at rest split or not: among them those of
/// hsdp_plan(), mics_plan() and hpz_plan().
std::vector<ShardingPlan> plans_with_degrees(int world, ReductionPolicy policy) {
  std::vector<ShardingPlan> plans;
  for (int optimizer = 1; optimizer <= world; ++optimizer) {
    if (world % optimizer != 0) continue;
    for (const int stage : {1, 2}) {
      plans.push_back(zero_plan(stage, {"dp"}));
      plans.back().optimizer_degree = optimizer;
      plans.back().name += "-o" + std::to_string(optimizer);
    }
    for (int parameter = 1; parameter <= optimizer; ++parameter) {
      if (optimizer % parameter != 0) continue;
      plans.push_back(zero_plan(3, {"dp"}));
      plans.back().parameter_degree = parameter;
      plans.back().optimizer_degree = optimizer;
      plans.back().name += "-w" + std::to_string(parameter) + "-o" + std::to_string(optimizer);
    }
  }
  for (ShardingPlan& plan : plans) plan.policy = policy;
  return plans;
}

/// A model with all that may be odd in one.
ToyTraining odd_training(const NodesCase& value) {
  ToyTraining training{.reports_memory = false};
  training.model = {
      .width = 97, .blocks = 3, .dtype = value.dtype};  // ten pieces a block: something for each of eight ranks
  training.model.reuse_last = true;
  training.model.tie_first_two = true;
  training.model.frozen_blocks = {2};
  training.model.round_gradients = value.dtype == DType::kBFloat16;
  training.world = value.world;
  training.per_node = value.per_node;
  training.micro_steps = 2;
  training.steps = 3;
  training.skip = [](int /*rank*/, std::int64_t step, int block) { return block > 0 && (step + block) % 3 == 0; };
  training.plan.policy = value.policy;
  return training;
}

/// Where memory is shared, ranks may do so under every plan.
ToyTraining training_on_different_paths(const NodesCase& value) {
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 97, .blocks = 5, .dtype = value.dtype};
  training.world = value.world;
  training.per_node = value.per_node;
  training.passes = 2;
  training.steps = 3;
  training.skip = [](int rank, std::int64_t step, int block) {
    return block > 0 && ((step + block) % 3 == 0 || (rank + block + step) % 4 == 0);
  };
  training.plan.policy = value.policy;
  return training;
}

std::vector<test::ThreadTransport> transports_of(const NodesCase& value) {
  std::vector<test::ThreadTransport> transports{test::ThreadTransport::kMemory, test::ThreadTransport::kMessages};
  if (value.per_node > 0) transports.push_back(test::ThreadTransport::kLevels);
  return transports;
}

/// The training gives `expected` under each plan over each transport, every other time in legal disorder.
void expect_same(const ToyOutcome& expected, ToyTraining training, const std::vector<ShardingPlan>& plans,
                 const std::vector<test::ThreadTransport>& transports) {
  for (const test::ThreadTransport transport : transports) {
    for (const ShardingPlan& plan : plans) {
      training.transport = transport;
      training.plan = plan;
      training.mode = training.chaos_seed % 2 == 0 ? ExecutionMode::kChaos : ExecutionMode::kInline;
      training.chaos_seed += 1;
      EXPECT_EQ(difference(expected, train_toy(training)), "")
          << plan.name << " transport " << static_cast<int>(transport) << " chaos seed " << training.chaos_seed;
    }
  }
}

class DegreesParity : public ::testing::TestWithParam<NodesCase> {};

/// Over how many ranks a state is split is memory and traffic, wherever the groups lie in the nodes: sums are
/// formed piece by piece over all ranks, along the nodes.
TEST_P(DegreesParity, EveryChainOfDegreesHasTheBitsOfStageZeroOnTheSameNodes) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = odd_training(GetParam());
  const ToyOutcome expected = train_toy(training);
  expect_same(expected, training, plans_with_degrees(world, policy), transports_of(GetParam()));
}

/// Where memory is shared, ranks may take different paths under every plan.
TEST_P(DegreesParity, RanksOnDifferentPathsHaveTheSameBits) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = training_on_different_paths(GetParam());
  training.plan.policy = policy;
  const ToyOutcome expected = train_toy(training);
  expect_same(expected, training, plans_with_degrees(world, policy), {test::ThreadTransport::kMemory});
}

/// The same with gradients summed in sub-groups: the degree of gradients is part of the numbers, the others are not.
class GradientDegreeParity : public ::testing::TestWithParam<NodesCase> {};

/// Those of plans_with_degrees() that go together with it, and stage 0.
std::vector<ShardingPlan> plans_with_gradient_degree(int world, int degree, ReductionPolicy policy) {
  std::vector<ShardingPlan> plans = plans_with_degrees(world, policy);
  plans.push_back(zero_plan(0, {"dp"}));
  const auto in_line = [degree](int other) { return degree % other == 0 || other % degree == 0; };
  std::erase_if(plans, [&](const ShardingPlan& plan) {
    return !in_line(plan.degrees(world).parameter) || !in_line(plan.degrees(world).optimizer);
  });
  for (ShardingPlan& plan : plans) {
    plan.gradient_degree = degree;
    plan.policy = policy;
    plan.name += "-g" + std::to_string(degree);
  }
  return plans;
}

/// Divisors of the world; of a large one those that matter most.
std::vector<int> gradient_degrees(int world) {
  if (world == 8) return {4};
  std::vector<int> divisors;
  for (int degree = 1; degree < world; ++degree) {
    if (world % degree == 0) divisors.push_back(degree);
  }
  return divisors;
}

TEST_P(GradientDegreeParity, EveryPlanHasTheBitsOfStageZero) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = odd_training(GetParam());
  const ToyOutcome of_all = train_toy(training);
  bool other_numbers = false;
  for (const int degree : gradient_degrees(world)) {
    const std::vector<ShardingPlan> plans = plans_with_gradient_degree(world, degree, policy);
    training.plan = plans.back();
    const ToyOutcome expected = train_toy(training);
    other_numbers = other_numbers || !difference(of_all, expected).empty();
    expect_same(expected, training, plans, transports_of(GetParam()));
  }
  // Once a step, sums of runs inside a node are steps of the node's.
  EXPECT_TRUE(other_numbers || policy == ReductionPolicy::kPerStep)
      << "the degree takes no part: this test could not fail";
}

/// Once a step, groups that are nodes make the sums of nodes: the numbers without a degree.
TEST_P(GradientDegreeParity, OneMicroStepInGroupsThatAreNodesHasTheSumsOfTheNodes) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 97, .blocks = 3, .dtype = dtype};
  training.world = world;
  training.per_node = per_node;
  training.steps = 3;
  const ToyOutcome expected = train_toy(training);
  for (const int stage : {0, 1, 2, 3}) {
    training.plan = zero_plan(stage, {"dp"});
    training.plan.gradient_degree = per_node > 0 ? per_node : world;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << stage;
  }
}

/// Where memory is shared, ranks may take different paths under every plan.
TEST_P(GradientDegreeParity, RanksOnDifferentPathsHaveTheSameBits) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = training_on_different_paths(GetParam());
  for (const int degree : gradient_degrees(world)) {
    const std::vector<ShardingPlan> plans = plans_with_gradient_degree(world, degree, policy);
    training.plan = plans.back();
    const ToyOutcome expected = train_toy(training);
    expect_same(expected, training, plans, {test::ThreadTransport::kMemory});
  }
}

/// Groups need not go through the model alike even where calls are matched: only the ranks of a group have to.
TEST_P(GradientDegreeParity, OverMessagesGroupsMayTakeDifferentPaths) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 97, .blocks = 5, .dtype = dtype};
  training.world = world;
  training.per_node = per_node;
  training.micro_steps = 2;
  training.steps = 3;
  for (const int degree : gradient_degrees(world)) {
    training.skip = [degree](int rank, std::int64_t step, int block) {
      return block > 0 && ((step + block) % 3 == 0 || (rank / degree + block + step) % 4 == 0);
    };
    training.plan = zero_plan(2, {"dp"});
    training.plan.policy = policy;
    training.plan.gradient_degree = degree;
    training.transport = test::ThreadTransport::kMemory;
    const ToyOutcome expected = train_toy(training);
    training.transport = test::ThreadTransport::kMessages;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << degree;
    if (per_node == 0) continue;
    training.transport = test::ThreadTransport::kLevels;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << degree;
  }
}

/// Two levels keep what shared memory allows inside a node: ranks of one may take different paths, if parameters and
/// gradients are split there.
TEST(OnNodes, RanksOfANodeMayTakeDifferentPathsWhereStatesAreSplitInsideIt) {
  for (const auto& [world, per_node, degree] : {std::tuple{4, 2, 2}, {6, 3, 3}}) {
    ToyTraining training{.reports_memory = false};
    training.model = {.width = 97, .blocks = 5, .dtype = world == 6 ? DType::kBFloat16 : DType::kFloat32};
    training.model.round_gradients = world == 6;
    training.world = world;
    training.per_node = per_node;
    training.micro_steps = 2;
    training.steps = 4;
    training.skip = [](int rank, std::int64_t step, int block) {
      return block > 0 && (rank * 5 + block * 3 + step * 7) % 4 == 0;
    };
    std::vector<ShardingPlan> plans = plans_with_gradient_degree(world, degree, ReductionPolicy::kPerMicroStep);
    training.plan = plans.back();
    const ToyOutcome expected = train_toy(training);
    std::erase_if(plans, [&, whole = world, node = per_node](const ShardingPlan& plan) {
      return node % plan.degrees(whole).parameter != 0;
    });
    ASSERT_GE(plans.size(), 2U);
    expect_same(expected, training, plans, {test::ThreadTransport::kLevels});
  }
}

TEST(OnNodes, RandomPathsOverAThousandStepsEqualTheReferenceWhereStatesAreSplitInsideANode) {
  ToyTraining training{.reports_memory = false};
  training.model = {.inputs = 3, .width = 7, .blocks = 6, .batch = 1};
  training.world = 4;
  training.per_node = 2;
  training.steps = test::kSanitized ? 100 : 1'000;
  training.skip = [paths = random_paths(6)](int rank, std::int64_t step, int block) {
    return block > 0 && paths(rank, step, block);
  };
  const auto plan_of = [](ShardingPlan plan) {
    plan.gradient_degree = 2;
    return plan;
  };
  training.plan = plan_of(zero_plan(0, {"dp"}));
  const ToyOutcome expected = train_toy(training);
  expect_same(expected, training, {plan_of(hsdp_plan(2, {"dp"})), plan_of(hpz_plan(2, {"dp"}))},
              {test::ThreadTransport::kLevels});
}

std::vector<NodesCase> degrees_cases() {
  std::vector<NodesCase> cases;
  for (const auto& [world, per_node] : {std::pair{4, 0}, {4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}}) {
    cases.push_back({DType::kFloat32, world, per_node, ReductionPolicy::kPerMicroStep});
    if (world != 6) cases.push_back({DType::kBFloat16, world, per_node, ReductionPolicy::kPerMicroStep});
    if (world == 6) cases.push_back({DType::kFloat64, world, per_node, ReductionPolicy::kPerStep});
    if (world == 4) cases.push_back({DType::kBFloat16, world, per_node, ReductionPolicy::kPerStep});
  }
  return cases;
}

std::vector<NodesCase> gradient_degree_cases() {
  return {{DType::kFloat32, 4, 0, ReductionPolicy::kPerMicroStep},
          {DType::kBFloat16, 4, 2, ReductionPolicy::kPerMicroStep},
          {DType::kFloat64, 6, 2, ReductionPolicy::kPerStep},
          {DType::kFloat32, 8, 4, ReductionPolicy::kPerMicroStep}};
}

std::vector<NodesCase> nodes_cases() {
  std::vector<NodesCase> cases;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const auto& [world, per_node] : {std::pair{4, 2}, {6, 3}, {5, 3}, {5, 2}}) {
      for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
        cases.push_back({dtype, world, per_node, policy});
      }
    }
  }
  return cases;
}

std::string name_of_nodes_case(const ::testing::TestParamInfo<NodesCase>& info) {
  const NodesCase& value = info.param;
  return std::string(name_of(value.dtype)) + "_" + std::to_string(value.per_node) + "per" +
         std::to_string(value.world) + "_" + std::string(name_of(value.policy));
}

INSTANTIATE_TEST_SUITE_P(AllCases, NodesParity, ::testing::ValuesIn(nodes_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(AllCases, DegreesParity, ::testing::ValuesIn(degrees_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(AllCases, GradientDegreeParity, ::testing::ValuesIn(gradient_degree_cases()),
                         name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(AllCases, ToyParity, ::testing::ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(AllCases, MatchedParity, ::testing::ValuesIn(matched_cases()), name_of_case);

}  // namespace
}  // namespace zeroth::testing
