// LAMB: the same bits under every plan, residency, split and transport, because norms of whole parameters are exact.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Matrices of more than a piece of a rank: their norms are of two ranks.
ToyTraining lamb(int stage, int world, DType dtype = DType::kFloat32) {
  ToyTraining training{.plan = zero_plan(stage, {"dp"}), .world = world, .steps = 6, .optimizer = "Lamb"};
  training.model.dtype = dtype;
  training.model.width = 70;
  training.model.frozen_blocks = {1};
  training.model.round_gradients = size_of(dtype) == 2;
  training.tamper = [dtype](int, ToyStructure&, EngineSettings& settings) {
    if (dtype == DType::kFloat16) settings.loss_scaling = {.enabled = true, .initial_power = 4, .window = 1};
  };
  return training;
}

TEST(Lamb, HasTheSameBitsUnderEveryPlan) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const int world : {1, 2, 3}) {
      ToyOutcome expected;
      for (const auto& [stage, threads] : {std::pair{0, 1}, {0, 2}, {1, 1}, {2, 2}, {3, 1}, {3, 2}}) {
        ToyTraining training = lamb(stage, world, dtype);
        training.micro_steps = 2;
        training.threads = threads;
        const ToyOutcome got = train_toy(training);
        if (stage == 0 && threads == 1) expected = got;
        const std::string where =
            std::string(name_of(dtype)) + " world " + std::to_string(world) + " stage " + std::to_string(stage);
        EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
        expect_planned_memory(got, where);
        for (const StepResult& result : got.results) EXPECT_TRUE(result.committed) << where;
      }
    }
  }
}

TEST(Lamb, HasTheSameBitsWithDegreesOverTransportsAndWithUnitsLeftOut) {
  ToyTraining training = lamb(0, 4);
  training.per_node = 2;
  training.skip = [](int, std::int64_t step, int block) { return block == 2 && step % 2 == 0; };
  training.left_out = [](int, std::int64_t step, int block) { return block == 0 && step == 3; };
  const ToyOutcome expected = train_toy(training);
  training.plan = zero_plan(2, {"dp"});
  training.plan.optimizer_degree = 2;
  EXPECT_EQ(difference(expected, train_toy(training)), "") << "optimizer_degree 2";
  for (const ThreadTransport transport :
       {ThreadTransport::kMemory, ThreadTransport::kMessages, ThreadTransport::kLevels, ThreadTransport::kMixed}) {
    training.plan = zero_plan(3, {"dp"});
    training.transport = transport;
    EXPECT_EQ(difference(expected, train_toy(training)), "") << "transport " << static_cast<int>(transport);
  }
}

TEST(Lamb, GoesOnFromACheckpointUnderAnotherPlan) {
  for (const auto& [from, to] : {std::pair{3, 0}, {0, 2}}) {
    const CheckpointFolder folder;
    (void)expect_goes_on(lamb(from, 2), lamb(to, 2), 3, folder);
  }
}

TEST(Lamb, ARatioIsThatOfTheWholeParameterBetweenItsLimits) {
  // With limits that are one number the rule is Adam's direction times it: any other split of the norms would show.
  ToyTraining training = lamb(3, 2, DType::kFloat64);
  const ToyOutcome free = train_toy(training);
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.lamb.min_coeff = settings.optimizer.lamb.max_coeff = 1.0;
  };
  const ToyOutcome one = train_toy(training);
  EXPECT_FALSE(one.same_numbers(free));
  training.optimizer = "AdamW";  // without decay both are p - lr * m / (sqrt(v) + eps)
  const auto without_decay = [](int, ToyStructure&, EngineSettings& settings) {
    for (GroupHyper& group : settings.groups) group.weight_decay = 0.0;
    settings.optimizer.lamb.min_coeff = settings.optimizer.lamb.max_coeff = 1.0;
  };
  training.tamper = without_decay;
  const ToyOutcome adam = train_toy(training);
  training.optimizer = "Lamb";
  const ToyOutcome got = train_toy(training);
  for (std::size_t param = 0; param < got.values.size(); ++param) {
    for (std::size_t i = 0; i < got.values[param].size(); ++i)
      EXPECT_NEAR(got.values[param][i], adam.values[param][i], 1e-12);
  }
}

TEST(Lamb, RefusesWhatHasNoMeaning) {
  ToyTraining early = lamb(2, 2);
  early.tamper = [](int, ToyStructure&, EngineSettings& settings) { settings.update.inside_backward = true; };
  early.clipping = 0.0;
  EXPECT_THAT(message_of(early), AllOf(HasSubstr("measures whole parameters"), HasSubstr("inside_backward")));
}

}  // namespace
}  // namespace zeroth::test
