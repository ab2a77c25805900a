// 1-bit Adam beside other features: the same bits as without them. Ranks compare their replicas in all of these
// trainings (zeroth.compare_replicas), so they also show that the comparison gives no false alarm.
#include "support/thread_ranks.h"
#include "toy_experts.h"
#include "toy_messages.h"
#include "toy_residency.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ToyTraining compared(ToyTraining training) {
  return with_setting(std::move(training), [](int, EngineSettings& settings) { settings.compare_replicas = true; });
}

/// Of two parameter groups, with a frozen, a tied and a twice used parameter.
ToyTraining mixed(int stage, int world, DType dtype = DType::kFloat32) {
  ToyTraining training = onebit(stage, world, dtype);
  training.model.width = 40;
  training.model.tie_first_two = true;
  training.model.reuse_last = true;
  training.reports_memory = false;
  if (dtype == DType::kFloat16) {
    training = with_setting(std::move(training), [](int, EngineSettings& settings) {
      settings.loss_scaling = {.enabled = true, .initial_power = 22, .window = 2, .hysteresis = 1};
    });
    training.steps = 16;
  }
  return compared(std::move(training));
}

std::vector<ShardingPlan> plans_of_four() {
  std::vector<ShardingPlan> plans{zero_plan(1, {"dp"}), zero_plan(2, {"dp"}), zero_plan(3, {"dp"}),
                                  hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"})};
  for (const int optimizer : {2, 4}) {
    plans.push_back(zero_plan(3, {"dp"}));
    plans.back().parameter_degree = 2;
    plans.back().optimizer_degree = optimizer;
    plans.back().name = "parameters over 2, optimizer over " + std::to_string(optimizer);
  }
  return plans;
}

TEST(OneBitAdamMixes, DegreesOfShardingAndDTypesHaveTheBitsOfStage0) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const ToyOutcome expected = train_toy(mixed(0, 4, dtype));
    int messages = 0;
    int skipped = 0;
    for (const StepResult& result : expected.results) {
      messages += result.messages ? 1 : 0;
      skipped += result.committed ? 0 : 1;
      EXPECT_EQ(result.messages, result.committed && result.step > kFreeze) << name_of(dtype);
    }
    EXPECT_GT(messages, 2) << name_of(dtype);
    EXPECT_EQ(skipped > 0, dtype == DType::kFloat16) << "overflows until the loss scale fits";
    for (const ShardingPlan& plan : plans_of_four()) {
      for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
        ToyTraining training = mixed(0, 4, dtype);
        training.plan = plan;
        training.transport = transport;
        EXPECT_EQ(difference(expected, train_toy(training)), "") << name_of(dtype) << " " << plan.name;
      }
    }
  }
}

// Until variances are frozen, sums over runs of ranks are another order of sums: plans with one degree are compared.
TEST(OneBitAdamMixes, ADegreeOfGradientsHasTheSameBitsWhateverElseIsSplit) {
  ToyTraining training = mixed(2, 4);
  training.plan.gradient_degree = 2;
  training.micro_steps = 2;
  const ToyOutcome expected = train_toy(training);
  training.plan = zero_plan(3, {"dp"});
  training.plan.gradient_degree = 2;
  EXPECT_EQ(difference(expected, train_toy(training)), "");
}

TEST(OneBitAdamMixes, PoliciesOfReductionAreOne) {
  ToyTraining training = mixed(2, 3);
  training.micro_steps = 3;
  training.plan.policy = ReductionPolicy::kPerMicroStep;
  const ToyOutcome expected = train_toy(training);
  training.plan.policy = ReductionPolicy::kPerStep;
  EXPECT_EQ(difference(expected, train_toy(training)), "");
}

TEST(OneBitAdamMixes, ParametersThatSomeRanksOrStepsDoNotUse) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    ToyTraining training = mixed(0, 3, dtype);
    training.skip = random_paths(5);
    training.left_out = [](int, std::int64_t step, int block) { return block == 3 && step > 1; };  // of a bias
    const ToyOutcome expected = train_toy(training);
    for (const int stage : {1, 3}) {
      training.plan = zero_plan(stage, {"dp"});
      EXPECT_EQ(difference(expected, train_toy(training)), "") << name_of(dtype) << " stage " << stage;
    }
  }
}

TEST(OneBitAdamMixes, AnyLegalOrderOfStreams) {
  const ToyOutcome expected = train_toy(mixed(0, 3));
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    ToyTraining training = mixed(3, 3);
    training.mode = ExecutionMode::kChaos;
    training.chaos_seed = seed;
    if (seed == 2) training.transport = ThreadTransport::kMessages;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << seed;
  }
}

// Variances, masters and parameters may rest in files; what messages are made of rests in memory.
TEST(OneBitAdamMixes, StatesInFilesHaveTheBitsOfStatesInMemory) {
  for (const auto& [stage, dtype, filed] :
       {std::tuple{0, 1, kOptimizerStates}, {2, 0, kBoth}, {3, 1, kBoth}, {3, 2, kOptimizerStates}}) {
    const FactorRow row{stage, 1, 1, dtype, 0, 1, 0, 0, 0, 0, filed, 0};
    ToyTraining resident = training_of(row);
    resident.optimizer = "OneBitAdam";
    resident.steps = 6;
    resident = compared(with_settings(resident, [](EngineSettings& settings) { settings.optimizer.freeze_step = 2; }));
    const ToyOutcome expected = train_toy(resident);
    EXPECT_TRUE(expected.results.back().messages);
    ToyTraining training = in_files(resident, row);
    const ToyOutcome got = train_toy(training);
    EXPECT_EQ(difference(expected, got), "") << "stage " << stage;
    for (std::size_t rank = 0; rank < got.memory.size(); ++rank) {
      if (got.memory[rank].spills == 0) {
        EXPECT_EQ(got.memory[rank].planned, got.memory[rank].measured_peak) << to_text(got.memory[rank]);
      }
      EXPECT_EQ(got.memory[rank].planned_files, got.memory[rank].measured_files);
      EXPECT_GT(got.memory[rank].planned_files, 0U);
      EXPECT_LT(got.memory[rank].planned[MemoryState::kOptimizer],
                expected.memory[rank].planned[MemoryState::kOptimizer]);
    }
  }
}

/// Experts on a mesh: their gradients are means over two ranks, those of the other units over four.
std::vector<ExpertsOutcome> train_experts(int dense, int experts) {
  ExpertsTraining training;
  training.steps = 6;
  training.dense = zero_plan(dense, {"edp", "ep"});
  training.experts = zero_plan(experts, {"edp"});
  training.tamper = [](int, std::vector<ParamSpec>&, EngineSettings& settings) {
    settings.optimizer = {.type = "OneBitAdam", .freeze_step = kFreeze};
    settings.compare_replicas = true;
  };
  std::vector<ExpertsOutcome> outcomes(kExpertRanks);
  const ThreadGroups groups(kExpertRanks, ThreadTransport::kMemory, nodes_of_ranks(kExpertRanks, 0));
  const RankReport report = try_ranks(kExpertRanks, [&](int rank, const std::shared_ptr<CommBackend>&) {
    outcomes[static_cast<std::size_t>(rank)] = train_experts_rank(training, groups.group(rank, quick_options()));
  });
  EXPECT_TRUE(report.ok()) << report.text();
  return outcomes;
}

TEST(OneBitAdamMixes, ExpertsHaveTheSameBitsAtEveryStage) {
  const std::vector<ExpertsOutcome> expected = train_experts(0, 0);
  EXPECT_TRUE(expected[0].results.back().messages);
  for (const auto& [dense, experts] : {std::pair{3, 3}, {1, 2}, {2, 0}}) {
    const std::vector<ExpertsOutcome> got = train_experts(dense, experts);
    for (std::size_t rank = 0; rank < got.size(); ++rank) {
      EXPECT_EQ(got[rank].values == expected[rank].values && got[rank].norms == expected[rank].norms, true)
          << "dense " << dense << " experts " << experts << " rank " << rank;
    }
  }
}

TEST(OneBitAdamMixes, RanksWithAnotherFreezeStepAreRefused) {
  ToyTraining training = onebit(2, 2);
  training = with_setting(std::move(training),
                          [](int rank, EngineSettings& settings) { settings.optimizer.freeze_step = kFreeze + rank; });
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("freeze_step")));
}

}  // namespace
}  // namespace zeroth::test
