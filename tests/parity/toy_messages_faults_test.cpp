// 1-bit Adam and faults: a step that is skipped changes nothing in either phase, checkpoints of either phase, replicas
// that one rank has changed, and what errors that are not fed back cost.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_messages.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// What one rank keeps, by state and parameter.
using OwnStates = std::map<std::string, std::vector<std::byte>>;

OwnStates own_states(Engine& engine) {
  OwnStates states;
  for (const std::string& kind :
       {std::string("param"), std::string("master"), std::string("exp_avg"), std::string("exp_avg_sq"),
        "worker_error@" + std::to_string(engine.rank()), std::string("server_error")}) {
    for (const StatePart& part : engine.local_states(kind))
      states[kind + " of " + part.name + " from " + std::to_string(part.range.begin)] = part.data;
  }
  return states;
}

/// The step with number `poisoned` has a gradient that is not finite, on one rank. Steps before it and after it are
/// committed.
ToyTraining poisoned_at(int poisoned, int stage, DType dtype) {
  ToyTraining training = onebit(stage, 2, dtype);
  training.reports_memory = false;
  training.poison = [poisoned](int rank, std::int64_t step, int, int param) {
    return rank == 1 && step == poisoned && param == 0;
  };
  if (dtype != DType::kFloat16) return training;
  return with_setting(std::move(training), [](int, EngineSettings& settings) {
    settings.loss_scaling = {.enabled = true, .initial_power = 4, .window = 100, .hysteresis = 1};
  });
}

// Of the first phase, of the change of phases, and of the second.
TEST(OneBitAdamFaults, ASkippedStepChangesNoStateInEitherPhase) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int stage : {0, 2, 3}) {
      for (const int poisoned : {1, kFreeze, kFreeze + 2}) {
        const std::string where =
            std::string(name_of(dtype)) + " stage " + std::to_string(stage) + " step " + std::to_string(poisoned);
        ToyTraining training = poisoned_at(poisoned, stage, dtype);
        std::vector<OwnStates> before(2);
        training.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
          OwnStates now = own_states(engine);
          OwnStates& last = before[static_cast<std::size_t>(engine.rank())];
          require(step.committed || now == last, where + ": states of a step that was skipped");
          require(!step.committed || now != last, where + ": states of a step that was not");
          require(now.size() > 20, where + ": states");
          last = std::move(now);
        };
        const ToyOutcome got = train_toy(training);
        for (std::size_t step = 0; step < got.results.size(); ++step) {
          const StepResult& result = got.results[step];
          EXPECT_EQ(result.committed, static_cast<int>(step) != poisoned) << where;
          if (result.committed) continue;
          EXPECT_EQ(result.cause, dtype == DType::kFloat16 ? SkipCause::kOverflow : SkipCause::kNonFinite) << where;
          ASSERT_TRUE(result.first_offender.has_value()) << where;
          EXPECT_EQ(result.first_offender->rank, 1) << where;
          EXPECT_EQ(result.first_offender->param, "in.weight") << where;
          EXPECT_FALSE(result.messages) << where;
        }
      }
    }
  }
}

// A run whose step was skipped goes on as one that has never had it: errors and momenta are those of the step before.
TEST(OneBitAdamFaults, AfterASkippedStepTrainingGoesOnAsWithoutIt) {
  for (const int poisoned : {kFreeze, kFreeze + 2}) {
    const CheckpointFolder folder;
    ToyTraining training = poisoned_at(poisoned, 3, DType::kFloat32);
    training.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
      if (step.committed && step.step == poisoned) (void)engine.save(folder.text());
    };
    const ToyOutcome expected = train_toy(training);
    ToyTraining without = onebit(0, 2);
    without.reports_memory = false;
    without.first_step = poisoned + 1;
    without.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
    EXPECT_EQ(train_toy(without).values == expected.values, true) << poisoned;
  }
}

ToyTraining resumed_from(const CheckpointFolder& folder, int stage, int world, int saved, std::int64_t freeze) {
  ToyTraining training = onebit(stage, world);
  training.reports_memory = false;
  training.model_seed = 99;
  training.first_step = saved;
  training.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  return with_setting(std::move(training),
                      [freeze](int, EngineSettings& settings) { settings.optimizer.freeze_step = freeze; });
}

ToyOutcome saved_at(const CheckpointFolder& folder, int stage, int world, int saved) {
  ToyTraining whole = onebit(stage, world);
  whole.reports_memory = false;
  whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == saved) (void)engine.save(folder.text());
  };
  return train_toy(whole);
}

// On another number of ranks the first phase goes on as AdamW does, and in the second all stages begin alike: momenta,
// variances and the errors of sums are those of the checkpoint, the errors of ranks zero.
TEST(OneBitAdamFaults, AnotherNumberOfRanksGoesOnAlikeAtEveryStage) {
  for (const int saved : {2, kFreeze, 5}) {
    const CheckpointFolder folder;
    (void)saved_at(folder, 3, 2, saved);
    for (const int world : {1, 3}) {
      const ToyOutcome expected = train_toy(resumed_from(folder, 0, world, saved, kFreeze));
      EXPECT_TRUE(expected.results.back().messages);
      for (const int stage : {1, 3}) {
        EXPECT_EQ(difference(expected, train_toy(resumed_from(folder, stage, world, saved, kFreeze))), "")
            << "saved after " << saved << ", " << world << " ranks, stage " << stage;
      }
    }
  }
}

// The variances of a checkpoint have had a number of updates, and this training must count as many.
TEST(OneBitAdamFaults, AFreezeStepThatAVarianceHasPassedIsRefused) {
  const auto error = [](int saved, std::int64_t freeze) {
    const CheckpointFolder folder;
    const ToyOutcome whole = saved_at(folder, 2, 2, saved);
    const ToyTraining resumed = resumed_from(folder, 2, 2, saved, freeze);
    return text_thrown_by([&] { (void)train_toy(resumed); });
  };
  EXPECT_EQ(error(2, 6), "no error") << "neither has frozen anything";
  EXPECT_EQ(error(2, 2), "no error") << "it begins to exchange where the checkpoint ends";
  EXPECT_EQ(error(kFreeze, 6), "no error") << "nothing has been exchanged yet";
  EXPECT_EQ(error(5, kFreeze), "no error");
  EXPECT_THAT(error(5, 6), AllOf(HasSubstr("[CHECKPOINT]"), HasSubstr("of step 5"), HasSubstr("freeze_step 6 here"),
                                 HasSubstr("3 there"), HasSubstr("to 3")))
      << "frozen there";
  EXPECT_THAT(error(2, 1), AllOf(HasSubstr("[CHECKPOINT]"), HasSubstr("freeze_step 1 here"), HasSubstr("to 2")))
      << "passed here";
}

/// The lowest bit of the first element of each block changes on one rank in one step.
ToyTraining flipped(int stage, int world, std::int64_t step, std::byte* const* (*of)(const StepBlock&)) {
  ToyTraining training = onebit(stage, world);
  training.reports_memory = false;
  training = with_setting(std::move(training), [](int, EngineSettings& settings) { settings.compare_replicas = true; });
  return meddled(std::move(training), [step, of, world](int rank) -> Meddled::After {
    if (rank != world - 1) return {};
    return [step, of](const StepBlock& block) {
      if (block.step != step) return;
      std::byte* const at = *of(block);
      at[0] = at[0] ^ std::byte{1};
    };
  });
}

TEST(Replicas, OneElementThatOneRankHasChangedIsNamed) {
  const auto parameter = [](const StepBlock& block) -> std::byte* const* { return &block.param; };
  const auto momentum = [](const StepBlock& block) -> std::byte* const* { return block.states.data(); };
  const auto variance = [](const StepBlock& block) -> std::byte* const* { return block.states.data() + 1; };
  EXPECT_THAT(message_of(flipped(0, 3, 2, parameter)),
              AllOf(HasSubstr("[MISMATCH]"), HasSubstr("engine.replicas"), HasSubstr("rank 2/3"),
                    HasSubstr("in.weight, parameter"), HasSubstr("as on rank 0/3")));
  EXPECT_THAT(message_of(flipped(0, 2, 5, variance)), AllOf(HasSubstr("rank 1/2"), HasSubstr("exp_avg_sq")));
  // Momenta of the second phase are replicas at every stage.
  EXPECT_THAT(message_of(flipped(3, 2, 5, momentum)), AllOf(HasSubstr("rank 1/2"), HasSubstr(", exp_avg;")));
  // What one rank alone has is compared with nothing.
  EXPECT_EQ(message_of(flipped(3, 2, 5, variance)), "no error");
}

TEST(Replicas, OfEveryOptimizerAndPlanAreAlike) {
  for (const char* const optimizer : {"AdamW", "SGD", "Lion"}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const ShardingPlan& plan : {zero_plan(0, {"dp"}), zero_plan(1, {"dp"}), zero_plan(3, {"dp"}),
                                       hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"})}) {
        ToyTraining training = small(0, 4);
        training.plan = plan;
        training.steps = 3;
        training.optimizer = optimizer;
        training.model.dtype = dtype;
        training.model.round_gradients = true;
        training.reports_memory = false;
        const ToyOutcome expected = train_toy(training);
        training = with_setting(training, [](int, EngineSettings& settings) { settings.compare_replicas = true; });
        EXPECT_EQ(difference(expected, train_toy(training)), "") << optimizer << " " << plan.name;
      }
    }
  }
}

double mean_of_last(const ToyOutcome& outcome, std::size_t count) {
  double sum = 0.0;
  for (std::size_t at = outcome.losses.size() - count; at < outcome.losses.size(); ++at)
    sum += std::stod(outcome.losses[at]);
  return sum / static_cast<double>(count);
}

// The negative control: the same training whose errors are forgotten after each step.
TEST(OneBitAdamFeedback, ErrorsThatAreForgottenCostMoreThanMessagesDo) {
  ToyTraining training{.plan = zero_plan(0, {"dp"}), .world = 2, .steps = 300, .reports_memory = false};
  training.model.batch = 16;
  training.optimizer = "AdamW";
  const double adam = mean_of_last(train_toy(training), 100);
  training.optimizer = "OneBitAdam";
  training = with_setting(training, [](int, EngineSettings& settings) { settings.optimizer.freeze_step = 60; });
  const double with = mean_of_last(train_toy(training), 100);
  const double without =
      mean_of_last(train_toy(meddled(training,
                                     [](int) {
                                       return [](const StepBlock& block) {
                                         if (block.step <= 60) return;
                                         for (const std::size_t error : {2U, 3U}) {
                                           if (block.states[error] == nullptr) continue;
                                           std::memset(block.states[error], 0, array_bytes(block.n, block.dtype));
                                         }
                                       };
                                     })),
                   100);
  RecordProperty("adamw", std::to_string(adam));
  RecordProperty("with_errors", std::to_string(with));
  RecordProperty("without_errors", std::to_string(without));
  EXPECT_LT(with, 1.02 * adam) << with << " against " << adam;
  EXPECT_GT(without, 1.3 * with) << without << " against " << with;
}

}  // namespace
}  // namespace zeroth::test
