// The stage changes memory, never numbers: the toy model on ranks that are threads, compared with ==.
//
// `make test` runs rows in which any three factors meet in every way that they can (PlanRows), or any two (DegreeRows);
// the whole grids are the suites that begin with Long.
#include "support/covering_array.h"
#include "support/sanitizer.h"
#include "support/toy_training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace zeroth::test {
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

constexpr ExecutionMode kModes[] = {ExecutionMode::kInline, ExecutionMode::kChaos};

/// For messages: what a training was compared with the reference as.
std::string text_of(const ToyTraining& training) {
  constexpr std::string_view kTransports[] = {"memory", "messages", "levels", "mixed"};
  const std::string order = training.mode == ExecutionMode::kChaos ? "chaos seed " + std::to_string(training.chaos_seed)
                                                                   : std::string("inline");
  return training.plan.name + " over " + std::string(kTransports[static_cast<std::size_t>(training.transport)]) + ", " +
         order;
}

/// The training gives `expected` under each plan over each transport, in program order and in legal disorder.
void expect_same(const ToyOutcome& expected, ToyTraining training, const std::vector<ShardingPlan>& plans,
                 const std::vector<ThreadTransport>& transports) {
  for (const ThreadTransport transport : transports) {
    for (const ShardingPlan& plan : plans) {
      for (const ExecutionMode mode : kModes) {
        training.transport = transport;
        training.plan = plan;
        training.mode = mode;
        training.chaos_seed += 1;
        try {
          EXPECT_EQ(difference(expected, train_toy(training)), "") << text_of(training);
        } catch (const std::exception& error) {
          ADD_FAILURE() << text_of(training) << ": " << error.what();
        }
      }
    }
  }
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
    expect_same(train_toy(training), training, all_plans(GetParam().policy), {ThreadTransport::kMemory});
  }
};

TEST_P(ToyParity, PlainModel) {
  expect_all_plans_equal(training());
}

/// Gradients of float16 under a loss scale that falls and grows: steps are skipped, the same ones at every stage.
TEST(HalfParity, LossScalesFallAndGrowAlikeAtEveryStage) {
  for (const int micro_steps : {1, 2}) {
    ToyTraining half{.reports_memory = false};
    half.model = {.width = 41, .blocks = 3, .dtype = DType::kFloat16, .round_gradients = true};
    half.world = 3;
    half.micro_steps = micro_steps;
    half.steps = 14;
    half.plan = zero_plan(0, {"dp"});
    half.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.loss_scaling = {.enabled = true, .initial_power = 22, .window = 2, .hysteresis = 1};
    };
    const ToyOutcome first = train_toy(half);
    int skipped = 0;
    double lowest = first.results[0].loss_scale;
    double last = lowest;
    for (const StepResult& result : first.results) {
      skipped += result.cause == SkipCause::kOverflow ? 1 : 0;
      lowest = std::min(lowest, result.loss_scale);
      last = result.loss_scale;
    }
    EXPECT_GT(skipped, 1);
    EXPECT_LT(skipped, 10);
    EXPECT_GT(last, lowest) << "it never grew";
    expect_same(first, half, all_plans(ReductionPolicy::kPerMicroStep),
                {ThreadTransport::kMemory, ThreadTransport::kMessages});
  }
}

/// A power of two changes no bit of what float32 gradients train, clipped by their norm.
TEST(HalfParity, AScaleIsNotInTheNumbers) {
  ToyTraining plain{.reports_memory = false};
  plain.model = {.width = 41, .blocks = 3, .dtype = DType::kFloat16};
  plain.world = 2;
  plain.plan = zero_plan(2, {"dp"});
  plain.tamper = [](int, ToyStructure&, EngineSettings& settings) { settings.gradient_clipping = 0.1; };
  const ToyOutcome without = train_toy(plain);
  plain.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.gradient_clipping = 0.1;
    settings.loss_scaling = {.enabled = true, .static_scale = 1024};
  };
  const ToyOutcome with = train_toy(plain);
  EXPECT_EQ(difference(without, with), "");
  EXPECT_EQ(with.results.back().loss_scale, 1024);
  EXPECT_LT(with.results.back().clip_coefficient, 1);
}

/// Parameters of 16 bits alone have such gradients.
class NarrowParity : public ToyParity {};

/// Buckets of 16 bits at stages 1 to 3, and wide ones where a gradient is a sum; with 32 bits at stage 0 they are the
/// same numbers.
TEST_P(NarrowParity, GradientsOf16Bits) {
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
    training.transport = ThreadTransport::kMemory;
    training.mode = ExecutionMode::kInline;
    expect_same(train_toy(training), training, all_plans(GetParam().policy), {ThreadTransport::kMessages});
  }
};

TEST_P(MatchedParity, CollectivesGiveTheBitsOfSharedMemory) {
  ToyTraining odd = training();
  odd.model.reuse_last = true;
  odd.model.tie_first_two = true;
  odd.model.frozen_blocks = {2};
  odd.skip = [](int /*rank*/, std::int64_t step, int block) {
    return block > 0 && (step + block) % 3 == 0;
  };  // on all ranks alike
  expect_messages_give_the_same(odd);
}

class NarrowMatchedParity : public MatchedParity {};

TEST_P(NarrowMatchedParity, GradientsOf16BitsAndSumsOf32FromOneRankOrAll) {
  ToyTraining narrow = training();
  narrow.model.round_gradients = true;
  narrow.passes = 2;
  expect_messages_give_the_same(narrow);
  narrow.model.reuse_last = true;
  expect_messages_give_the_same(narrow);
  narrow.model.wide_rank = 0;
  expect_messages_give_the_same(narrow);
}

const std::vector<ThreadTransport> kAllTransports{ThreadTransport::kMemory, ThreadTransport::kMessages,
                                                  ThreadTransport::kLevels};

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
  training.per_node = per_node;
  const ToyOutcome expected = train_toy(training);
  expect_same(expected, training, all_plans(policy), kAllTransports);
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
  // Not a matter of orders: these gradients are zero on some ranks, and are not where nothing is left out.
  EXPECT_NE(difference(train_toy(whole), expected), "") << "nothing is left out: this test could not fail";
  training.zeros_for_left_out = false;
  expect_same(expected, training, all_plans(policy), kAllTransports);
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

std::vector<ThreadTransport> transports_of(const NodesCase& value) {
  std::vector<ThreadTransport> transports{ThreadTransport::kMemory, ThreadTransport::kMessages};
  if (value.per_node > 0) transports.push_back(ThreadTransport::kLevels);
  return transports;
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
  expect_same(expected, training, plans_with_degrees(world, policy), {ThreadTransport::kMemory});
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
  for (const int degree : gradient_degrees(world)) {
    const std::vector<ShardingPlan> plans = plans_with_gradient_degree(world, degree, policy);
    training.plan = plans.back();
    const ToyOutcome expected = train_toy(training);
    expect_same(expected, training, plans, transports_of(GetParam()));
  }
}

/// In `make test` as a whole.
class GroupsParity : public ::testing::TestWithParam<NodesCase> {};

/// Once a step, groups that are nodes make the sums of nodes: the numbers without a degree.
TEST_P(GroupsParity, OneMicroStepInGroupsThatAreNodesHasTheSumsOfTheNodes) {
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
    expect_same(expected, training, plans, {ThreadTransport::kMemory});
  }
}

/// Groups need not go through the model alike even where calls are matched: only the ranks of a group have to.
TEST_P(GroupsParity, OverMessagesGroupsMayTakeDifferentPaths) {
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
    training.transport = ThreadTransport::kMemory;
    const ToyOutcome expected = train_toy(training);
    training.transport = ThreadTransport::kMessages;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << degree;
    if (per_node == 0) continue;
    training.transport = ThreadTransport::kLevels;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << degree;
  }
}

/// Two levels keep what shared memory allows inside a node: ranks of one may take different paths, if parameters and
/// gradients are split there.
void expect_different_paths_inside_nodes(int world, int per_node, int degree) {
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
  std::erase_if(plans, [&](const ShardingPlan& plan) { return per_node % plan.degrees(world).parameter != 0; });
  ASSERT_GE(plans.size(), 2U);
  expect_same(expected, training, plans, {ThreadTransport::kLevels});
}

TEST(OnNodes, RanksOfANodeMayTakeDifferentPathsWhereStatesAreSplitInsideIt) {
  expect_different_paths_inside_nodes(4, 2, 2);
}

TEST(LongOnNodes, ThreeRanksOfANodeMayTakeDifferentPathsWhereStatesAreSplitInsideIt) {
  expect_different_paths_inside_nodes(6, 3, 3);
}

void expect_random_paths_equal(int steps) {
  ToyTraining training{.reports_memory = false};
  training.model = {.inputs = 3, .width = 7, .blocks = 6, .batch = 1};
  training.world = 4;
  training.per_node = 2;
  training.steps = steps;
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
              {ThreadTransport::kLevels});
}

TEST(OnNodes, RandomPathsEqualTheReferenceWhereStatesAreSplitInsideANode) {
  expect_random_paths_equal(50);
}

TEST(LongOnNodes, RandomPathsOverAThousandStepsEqualTheReferenceWhereStatesAreSplitInsideANode) {
  expect_random_paths_equal(1'000);
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

/// The numbers are what they are because of the order of sums, by choice: in rank order this sum is 0, in the order of
/// runs of ranks (nodes, or groups of a degree) it is 1. `big` + 1 rounds to `big`.
ToyModel::ChosenRule zero_unless_in_runs(const NodesCase& value, int run) {
  const double big = value.dtype == DType::kFloat64 ? 0x1p53 : 0x1p24;
  return [=, last = std::min(2 * run, value.world) - 1](int rank) {
    if (rank == run - 1) return big;
    if (rank == last - 1) return 1.0;
    return rank == last ? -big : 0.0;
  };
}

class OrderOfSums : public ::testing::TestWithParam<NodesCase> {
 protected:
  static ToyTraining training(const ToyModel::ChosenRule& chosen) {
    ToyTraining result{.reports_memory = false};
    result.model = {.width = 41, .blocks = 2, .dtype = GetParam().dtype};
    result.model.round_gradients = GetParam().dtype == DType::kBFloat16;
    result.world = GetParam().world;
    result.steps = 2;
    result.plan.policy = GetParam().policy;
    result.chosen_gradients = chosen;
    return result;
  }
  /// Of all gradients together, in every step.
  static void expect_zero_norm(const ToyOutcome& outcome, bool zero) {
    for (const StepResult& result : outcome.results) EXPECT_EQ(result.grad_norm == 0, zero) << result.grad_norm;
  }
};

TEST_P(OrderOfSums, TheNodesTakePart) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = OrderOfSums::training(zero_unless_in_runs(GetParam(), per_node));
  expect_zero_norm(train_toy(training), true);
  training.per_node = per_node;
  const ToyOutcome expected = train_toy(training);
  expect_zero_norm(expected, false);
  expect_same(expected, training, {all_plans(policy)[2], all_plans(policy)[3]}, kAllTransports);
}

/// The same runs as groups: a degree divides the ranks.
class OrderOfGroups : public OrderOfSums {};

TEST_P(OrderOfGroups, TheDegreeOfGradientsTakesPart) {
  const auto [dtype, world, per_node, policy] = GetParam();
  ToyTraining training = OrderOfSums::training(zero_unless_in_runs(GetParam(), per_node));
  const std::vector<ShardingPlan> plans = plans_with_gradient_degree(world, per_node, policy);
  training.plan = plans.back();
  const ToyOutcome expected = train_toy(training);
  expect_zero_norm(expected, false);
  expect_same(expected, training, {plans.front()}, {ThreadTransport::kMemory, ThreadTransport::kMessages});
}

/// Rows for `make test`: factors, the levels of which are numbers into these lists.
struct Ranks {
  int world;
  int per_node;
};

std::string name_of_ranks(const Ranks& ranks) {
  return std::to_string(ranks.world) + "ranks" + (ranks.per_node == 0 ? "" : "on" + std::to_string(ranks.per_node));
}

constexpr DType kDtypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16};
constexpr ReductionPolicy kPolicies[] = {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep};
constexpr int kMicroSteps[] = {1, 3};

/// Any three of what a training is made of, in every way in which they can meet.
enum class Shape { kPlain, kOdd, kNarrow, kNarrowSums, kLeftOut };

struct PlanRow {
  Ranks ranks;
  DType dtype;
  int micro_steps;
  ReductionPolicy policy;
  ShardingPlan plan;
  ExecutionMode mode;
  ThreadTransport transport;
  Shape shape;
};

std::ostream& operator<<(std::ostream& out, const PlanRow& row) {
  return out << name_of(row.dtype) << ", " << name_of_ranks(row.ranks) << ", " << row.plan.name;
}

std::vector<PlanRow> plan_rows() {
  // Under sanitizers, which look at memory and threads and not at numbers: two of the factors, and small worlds.
  const std::vector<Ranks> ranks =
      kSanitized ? std::vector<Ranks>{{2, 0}, {3, 0}, {4, 2}}
                 : std::vector<Ranks>{{1, 0}, {2, 0}, {3, 0}, {4, 0}, {7, 0}, {4, 2}, {5, 2}, {5, 3}, {6, 3}};
  const auto count = [](const auto& list) { return static_cast<int>(std::size(list)); };
  const std::vector<int> levels{count(ranks),         count(kDtypes), count(kMicroSteps),    count(kPolicies),
                                count(all_plans({})), count(kModes),  count(kAllTransports), 5};
  const auto row_of = [&](const FactorRow& row) {
    const auto at = [&](std::size_t factor) { return static_cast<std::size_t>(row[factor]); };
    return PlanRow{.ranks = ranks[at(0)],
                   .dtype = kDtypes[at(1)],
                   .micro_steps = kMicroSteps[at(2)],
                   .policy = kPolicies[at(3)],
                   .plan = all_plans(kPolicies[at(3)])[at(4)],
                   .mode = kModes[at(5)],
                   .transport = kAllTransports[at(6)],
                   .shape = static_cast<Shape>(row[7])};
  };
  const auto valid = [&](const FactorRow& levels_of_row) {
    const PlanRow row = row_of(levels_of_row);
    const bool narrow = row.shape == Shape::kNarrow || row.shape == Shape::kNarrowSums;
    return (!narrow || row.dtype == DType::kBFloat16) &&
           (row.transport != ThreadTransport::kLevels || row.ranks.per_node > 0);
  };
  std::vector<PlanRow> rows;
  for (const FactorRow& row : covering_array(levels, kSanitized ? 2 : 3, valid)) rows.push_back(row_of(row));
  return rows;
}

class PlanRows : public ::testing::TestWithParam<PlanRow> {};

TEST_P(PlanRows, HasTheBitsOfStageZeroInSharedMemory) {
  const PlanRow& row = GetParam();
  ToyTraining training{.reports_memory = false};
  training.model = {.width = 41, .blocks = 5, .dtype = row.dtype};
  training.world = row.ranks.world;
  training.per_node = row.ranks.per_node;
  training.micro_steps = row.micro_steps;
  training.plan.policy = row.policy;
  const bool sums = row.shape == Shape::kOdd || row.shape == Shape::kNarrowSums;
  training.model.reuse_last = sums;
  training.model.tie_first_two = sums;
  training.model.round_gradients = row.shape == Shape::kNarrow || row.shape == Shape::kNarrowSums;
  if (row.shape == Shape::kNarrowSums) training.model.wide_rank = row.ranks.world / 2;
  if (row.shape == Shape::kNarrow) training.passes = 2;
  if (row.shape == Shape::kOdd) training.model.frozen_blocks = {2};
  if (row.shape == Shape::kLeftOut) {
    training.left_out = [](int rank, std::int64_t step, int block) {
      return rank > 0 && (rank + step + block) % 3 == 0;
    };
  }
  if (sums) {
    // Ranks take different paths where memory is shared; in some steps a block is skipped by everybody.
    const bool apart = row.transport == ThreadTransport::kMemory;
    training.skip = [apart](int rank, std::int64_t step, int block) {
      return block > 0 && ((step + block) % 3 == 0 || (apart && (rank + block + step) % 4 == 0));
    };
  }
  const ToyOutcome expected = train_toy(training);
  training.plan = row.plan;
  training.mode = row.mode;
  training.chaos_seed = 1;
  training.transport = row.transport;
  EXPECT_EQ(difference(expected, train_toy(training)), "") << text_of(training);
}

/// Any two of: nodes, dtype, policy, chain of degrees, degree of gradients, mode, transport, paths.
struct DegreeRow {
  NodesCase nodes;
  ShardingPlan plan;
  int gradient_degree;  ///< 0: none
  ExecutionMode mode;
  ThreadTransport transport;
  bool different_paths;
};

std::ostream& operator<<(std::ostream& out, const DegreeRow& row) {
  return out << name_of(row.nodes.dtype) << ", " << name_of_ranks({row.nodes.world, row.nodes.per_node}) << ", "
             << row.plan.name;
}

std::vector<DegreeRow> degree_rows() {
  const std::vector<Ranks> ranks = kSanitized ? std::vector<Ranks>{{4, 0}, {4, 2}}
                                              : std::vector<Ranks>{{4, 0}, {4, 2}, {6, 2}, {6, 3}, {8, 2}, {8, 4}};
  const int most_plans = static_cast<int>(plans_with_degrees(ranks.back().world, {}).size());
  const std::vector<int> levels{static_cast<int>(ranks.size()), 3, 2, most_plans, 5, 2, 3, 2};
  const auto plans_of = [&](const FactorRow& row) {
    const int world = ranks[static_cast<std::size_t>(row[0])].world;
    const ReductionPolicy policy = kPolicies[row[2]];
    return row[4] == 0 ? plans_with_degrees(world, policy) : plans_with_gradient_degree(world, row[4], policy);
  };
  const auto valid = [&](const FactorRow& row) {
    const Ranks& of = ranks[static_cast<std::size_t>(row[0])];
    const bool degree_fits = row[4] == 0 || (of.world % row[4] == 0 && row[4] < of.world);
    const bool levels_fit =
        kAllTransports[static_cast<std::size_t>(row[6])] != ThreadTransport::kLevels || of.per_node > 0;
    const bool paths_fit = row[7] == 0 || kAllTransports[static_cast<std::size_t>(row[6])] == ThreadTransport::kMemory;
    return degree_fits && levels_fit && paths_fit && static_cast<std::size_t>(row[3]) < plans_of(row).size();
  };
  std::vector<DegreeRow> rows;
  for (const FactorRow& row : covering_array(levels, 2, valid)) {
    const Ranks& of = ranks[static_cast<std::size_t>(row[0])];
    rows.push_back({.nodes = {kDtypes[row[1]], of.world, of.per_node, kPolicies[row[2]]},
                    .plan = plans_of(row)[static_cast<std::size_t>(row[3])],
                    .gradient_degree = row[4],
                    .mode = kModes[row[5]],
                    .transport = kAllTransports[static_cast<std::size_t>(row[6])],
                    .different_paths = row[7] == 1});
  }
  return rows;
}

class DegreeRows : public ::testing::TestWithParam<DegreeRow> {};

TEST_P(DegreeRows, HasTheBitsOfStageZeroOnTheSameNodes) {
  const DegreeRow& row = GetParam();
  ToyTraining training = row.different_paths ? training_on_different_paths(row.nodes) : odd_training(row.nodes);
  training.plan.gradient_degree = row.gradient_degree;
  const ToyOutcome expected = train_toy(training);
  training.plan = row.plan;
  training.mode = row.mode;
  training.chaos_seed = 1;
  training.transport = row.transport;
  EXPECT_EQ(difference(expected, train_toy(training)), "") << text_of(training);
}

std::string name_of_plan_row(const ::testing::TestParamInfo<PlanRow>& info) {
  std::string name = std::to_string(info.index) + "_" + std::string(name_of(info.param.dtype)) + "_" +
                     name_of_ranks(info.param.ranks) + "_" + info.param.plan.name;
  std::ranges::replace(name, '-', '_');
  return name;
}

std::string name_of_degree_row(const ::testing::TestParamInfo<DegreeRow>& info) {
  std::string name = std::to_string(info.index) + "_" + std::string(name_of(info.param.nodes.dtype)) + "_" +
                     name_of_ranks({info.param.nodes.world, info.param.nodes.per_node}) + "_" + info.param.plan.name;
  std::ranges::replace(name, '-', '_');
  return name;
}

std::vector<NodesCase> cases_of_orders() {
  return {{DType::kFloat32, 4, 2, ReductionPolicy::kPerMicroStep},
          {DType::kBFloat16, 6, 3, ReductionPolicy::kPerStep},
          {DType::kFloat64, 4, 2, ReductionPolicy::kPerStep},
          {DType::kFloat32, 5, 3, ReductionPolicy::kPerStep},
          {DType::kBFloat16, 5, 2, ReductionPolicy::kPerMicroStep}};
}

template <class Cases>
Cases of_16_bits(Cases cases) {
  std::erase_if(cases, [](const auto& value) { return value.dtype != DType::kBFloat16; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Rows, PlanRows, ::testing::ValuesIn(plan_rows()), name_of_plan_row);
INSTANTIATE_TEST_SUITE_P(Rows, DegreeRows, ::testing::ValuesIn(degree_rows()), name_of_degree_row);
INSTANTIATE_TEST_SUITE_P(AllCases, OrderOfSums, ::testing::ValuesIn(cases_of_orders()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(AllCases, OrderOfGroups, ::testing::ValuesIn([] {
                           std::vector<NodesCase> cases = cases_of_orders();
                           std::erase_if(cases, [](const auto& value) { return value.world % value.per_node != 0; });
                           return cases;
                         }()),
                         name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(AllCases, GroupsParity, ::testing::ValuesIn(gradient_degree_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(Long, NodesParity, ::testing::ValuesIn(nodes_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(Long, DegreesParity, ::testing::ValuesIn(degrees_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(Long, GradientDegreeParity, ::testing::ValuesIn(gradient_degree_cases()), name_of_nodes_case);
INSTANTIATE_TEST_SUITE_P(Long, ToyParity, ::testing::ValuesIn(all_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, NarrowParity, ::testing::ValuesIn(of_16_bits(all_cases())), name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, MatchedParity, ::testing::ValuesIn(matched_cases()), name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, NarrowMatchedParity, ::testing::ValuesIn(of_16_bits(matched_cases())), name_of_case);

}  // namespace
}  // namespace zeroth::test
