// 1-bit Adam, 1-bit LAMB and 0/1 Adam: the same bits under every plan, transport and residency, those of AdamW and LAMB
// until the variances are frozen, and a training that goes on from a checkpoint of either phase.
#include "toy_messages.h"

#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"

#include <zeroth/base/error.h>
#include <zeroth/checkpoint/folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OneBitAdam, HasTheSameBitsUnderEveryPlan) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const int world : {1, 2, 4}) {
      for (const int micro_steps : {1, 3}) {
        ToyOutcome expected;
        for (const int stage : {0, 1, 2, 3}) {
          ToyTraining training = onebit(stage, world, dtype);
          training.micro_steps = micro_steps;
          const ToyOutcome got = train_toy(training);
          if (stage == 0) expected = got;
          const std::string where = std::string(name_of(dtype)) + " world " + std::to_string(world) + " micro-steps " +
                                    std::to_string(micro_steps) + " stage " + std::to_string(stage);
          EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
          expect_planned_memory(got, where);
          ASSERT_EQ(got.results.size(), 8U);
          for (const StepResult& result : got.results) EXPECT_TRUE(result.committed) << where;
        }
      }
    }
  }
}

TEST(OneBitAdam, HasTheSameBitsOverEveryTransport) {
  for (const auto& [stage, per_node] : {std::pair{0, 0}, {3, 0}, {0, 2}, {3, 2}}) {
    ToyTraining training = onebit(stage, 4);
    training.per_node = per_node;  // until variances are frozen, sums go along the nodes
    const ToyOutcome expected = train_toy(training);
    for (const ThreadTransport transport :
         {ThreadTransport::kMessages, ThreadTransport::kLevels, ThreadTransport::kMixed}) {
      if (per_node == 0 && transport != ThreadTransport::kMessages) continue;
      training.transport = transport;
      const ToyOutcome got = train_toy(training);
      EXPECT_TRUE(got.same_numbers(expected))
          << "stage " << stage << " transport " << static_cast<int>(transport) << ": " << difference(expected, got);
    }
  }
}

TEST(OneBitAdam, IsAdamWUntilItsVariancesAreFrozen) {
  for (const int stage : {0, 3}) {
    for (const int micro_steps : {1, 2}) {
      ToyTraining training = onebit(stage, 3);
      training.micro_steps = micro_steps;
      training.steps = kFreeze;
      const ToyOutcome got = train_toy(training);
      training.optimizer = "AdamW";
      training.plan.policy = ReductionPolicy::kPerStep;
      const ToyOutcome expected = train_toy(training);
      EXPECT_TRUE(got.same_numbers(expected)) << difference(expected, got);
      training.steps = kFreeze + 1;
      const ToyOutcome adam = train_toy(training);
      training.optimizer = "OneBitAdam";
      EXPECT_FALSE(train_toy(training).same_numbers(adam)) << "the step after it is another one";
    }
  }
}

TEST(OneBitAdam, GoesOnFromACheckpointOfEitherPhase) {
  for (const auto& [saved, from, to] : {std::tuple{2, 3, 0}, {3, 0, 3}, {5, 3, 1}, {5, 0, 3}}) {
    const CheckpointFolder folder;
    const ToyTraining resumed = expect_goes_on(onebit(from, 2), onebit(to, 2), saved, folder);
    // Another world has no errors of these ranks, and goes on without.
    ToyTraining other = resumed;
    other.world = 3;
    other.plan = zero_plan(to, {"dp"});
    EXPECT_TRUE(train_toy(other).results.back().committed);
  }
}

TEST(OneBitAdam, ABlockWithoutGradientsKeepsItsErrors) {
  ToyTraining training = onebit(0, 2);
  training.skip = [](int rank, std::int64_t step, int block) { return block == 2 && (step % 2 == 0 || rank == 1); };
  const ToyOutcome expected = train_toy(training);
  for (const int stage : {1, 2, 3}) {
    training.plan = zero_plan(stage, {"dp"});
    const ToyOutcome got = train_toy(training);
    EXPECT_TRUE(got.same_numbers(expected)) << "stage " << stage << ": " << difference(expected, got);
  }
}

/// Looks at variances after each 4th of 24 steps.
ToyTraining settling(int stage, int world, double threshold, const char* optimizer = "OneBitAdam") {
  ToyTraining training = onebit(stage, world, DType::kFloat32, optimizer);
  training.steps = 24;
  training.tamper = [threshold](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.freeze_step = 22;
    settings.optimizer.freeze_threshold = threshold;
    for (GroupHyper& group : settings.groups) group.beta2 = 0.75;
  };
  return training;
}

/// Steps before the first that exchanges messages.
std::int64_t frozen_after(const ToyOutcome& outcome) {
  const auto first = std::ranges::find_if(outcome.results, [](const StepResult& step) { return step.messages; });
  return first - outcome.results.begin();
}

TEST(SettledVariances, AreFrozenAtTheStepThatTheirSumsSay) {
  // By reading all variances after each step of AdamW.
  std::vector<double> sums;  // without the bias of the first steps
  ToyTraining watched = settling(2, 2, 0.0);
  watched.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    double sum = 0.0;
    engine.read_states({.kind = "exp_avg_sq"}, [&](StateTensor tensor) {
      const std::span<const float> values(reinterpret_cast<const float*>(tensor.data.data()),
                                          tensor.data.size() / sizeof(float));
      for (const float value : values) sum += value;
    });
    if (engine.rank() == 0 && step.step % 4 == 0 && step.step < 22)
      sums.push_back(sum / (1.0 - std::pow(0.75, step.step)));
  };
  EXPECT_EQ(frozen_after(train_toy(watched)), 22);
  ASSERT_EQ(sums.size(), 5U);
  std::vector<double> ratios;
  for (std::size_t look = 1; look < sums.size(); ++look)
    ratios.push_back(std::min(sums[look - 1], sums[look]) / std::max(sums[look - 1], sums[look]));
  // A threshold that the first look does not reach and a later one does.
  const double least = ratios[0];
  const auto found = std::ranges::find_if(ratios, [least](double ratio) { return ratio > least; });
  ASSERT_NE(found, ratios.end()) << "the sums do not settle: " << ::testing::PrintToString(ratios);
  const double threshold = (least + *found) / 2;
  const std::int64_t expected = 4 * (found - ratios.begin() + 2);
  for (const auto& [optimizer, least_ratio] : {std::pair{"OneBitAdam", threshold}, {"OneBitLamb", 0.5}}) {
    ToyOutcome first;
    for (const int stage : {0, 1, 2, 3}) {
      const ToyOutcome got = train_toy(settling(stage, 2, least_ratio, optimizer));
      if (stage == 0) first = got;
      EXPECT_TRUE(got.same_numbers(first)) << optimizer << " stage " << stage << ": " << difference(first, got);
      expect_planned_memory(got, optimizer);
    }
    if (optimizer == std::string("OneBitAdam")) {
      EXPECT_EQ(frozen_after(first), expected);
    }
    ASSERT_LT(frozen_after(first), 22);
    // The same as with that freeze_step.
    ToyTraining given = with_setting(settling(0, 2, 0.0, optimizer), [&](int, EngineSettings& settings) {
      settings.optimizer.freeze_step = frozen_after(first);
    });
    EXPECT_TRUE(train_toy(given).same_numbers(first)) << difference(train_toy(given), first);
  }
}

TEST(SettledVariances, GoOnFromCheckpointsBeforeAndAfter) {
  const double threshold = 0.5;
  const auto frozen = static_cast<int>(frozen_after(train_toy(settling(0, 2, threshold))));
  ASSERT_LT(frozen, 22);
  ASSERT_GE(frozen, 8);
  for (const int saved : {frozen - 2, frozen, frozen + 3}) {
    const CheckpointFolder folder;
    (void)expect_goes_on(settling(3, 2, threshold), settling(0, 2, threshold), saved, folder);
  }
  // One that freezes by number only is told which.
  const CheckpointFolder folder;
  ToyTraining whole = settling(2, 2, threshold);
  whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == frozen + 2) (void)engine.save(folder.text());
  };
  (void)train_toy(whole);
  ToyTraining other = settling(2, 2, 0.0);
  other.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  EXPECT_THAT(message_of(other), AllOf(HasSubstr("[CHECKPOINT]"), HasSubstr("freeze_step " + std::to_string(frozen))));
}

TEST(SettledVariances, AreNotLookedForInTheWarmup) {
  const ToyTraining training = with_setting(settling(1, 2, 0.1), [](int, EngineSettings& settings) {
    settings.schedule.kind = LearningRateSchedule::Kind::kWarmup;
    settings.schedule.warmup_steps = 9;
  });
  EXPECT_EQ(frozen_after(train_toy(training)), 16) << "12 is the first look after it";
  EXPECT_THAT(message_of(settling(0, 1, 1.0)), HasSubstr("freeze_threshold"));
}

class OtherMessages : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, OtherMessages, ::testing::Values("OneBitLamb", "ZeroOneAdam"));

TEST_P(OtherMessages, HaveTheSameBitsUnderEveryPlanAndTransport) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const int world : {1, 2, 3}) {
      ToyOutcome expected;
      for (const int stage : {0, 1, 2, 3}) {
        ToyTraining training = onebit(stage, world, dtype, GetParam());
        training.model.width = 40;
        training.micro_steps = 2;
        if (stage == 1) training.transport = ThreadTransport::kMessages;
        const ToyOutcome got = train_toy(training);
        if (stage == 0) expected = got;
        const std::string where =
            std::string(name_of(dtype)) + " world " + std::to_string(world) + " stage " + std::to_string(stage);
        EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
        expect_planned_memory(got, where);
        for (const StepResult& result : got.results) EXPECT_TRUE(result.committed) << where;
      }
    }
  }
}

TEST_P(OtherMessages, ABlockWithoutGradientsKeepsItsErrors) {
  ToyOutcome expected;
  for (const int stage : {0, 1, 2, 3}) {
    ToyTraining training = onebit(stage, 2, DType::kFloat32, GetParam());
    training.skip = [](int rank, std::int64_t step, int block) { return block == 2 && (step % 2 == 0 || rank == 1); };
    const ToyOutcome got = train_toy(training);
    if (stage == 0) expected = got;
    EXPECT_TRUE(got.same_numbers(expected)) << "stage " << stage << ": " << difference(expected, got);
  }
}

TEST_P(OtherMessages, GoOnFromACheckpointOfEachPhase) {
  for (const auto& [saved, from, to] :
       {std::tuple{2, 3, 0}, {3, 0, 3}, {4, 0, 1}, {5, 3, 1}, {5, 0, 3}, {6, 2, 0}, {7, 3, 2}}) {
    const CheckpointFolder folder;
    (void)expect_goes_on(onebit(from, 2, DType::kFloat32, GetParam()), onebit(to, 2, DType::kFloat32, GetParam()),
                         saved, folder);
  }
}

TEST(OneBitLamb, IsLambUntilItsVariancesAreFrozen) {
  for (const int stage : {0, 3}) {
    ToyTraining training = onebit(stage, 3, DType::kFloat32, "OneBitLamb");
    training.steps = kFreeze;
    training.micro_steps = 2;
    const ToyOutcome got = train_toy(training);
    training.optimizer = "Lamb";
    training.plan.policy = ReductionPolicy::kPerStep;
    const ToyOutcome expected = train_toy(training);
    EXPECT_TRUE(got.same_numbers(expected)) << difference(expected, got);
    training.steps = kFreeze + 1;
    const ToyOutcome lamb = train_toy(training);
    training.optimizer = "OneBitLamb";
    EXPECT_FALSE(train_toy(training).same_numbers(lamb)) << "the step after it is another one";
  }
}

TEST(ZeroOneAdam, IsAdamWWhileEveryStepChangesVariances) {
  for (const int stage : {0, 3}) {
    ToyTraining training = onebit(stage, 2, DType::kFloat32, "ZeroOneAdam");
    training.steps = 2;
    const ToyOutcome got = train_toy(training);
    training.optimizer = "AdamW";
    training.plan.policy = ReductionPolicy::kPerStep;
    const ToyOutcome expected = train_toy(training);
    EXPECT_TRUE(got.same_numbers(expected)) << difference(expected, got);
  }
}

constexpr int kLastStep = 16;

/// Synchronises after steps 4, 5, 6, 8, 12 and 16; before, variances change in steps 1, 2 and 4.
ToyTraining local_steps(int world, DType dtype = DType::kFloat32) {
  ToyTraining training = onebit(0, world, dtype, "ZeroOneAdam");
  training.steps = kLastStep;
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.zero_one = {
        .var_freeze_step = 3, .var_update_scaler = 2, .local_step_scaler = 2, .local_step_clipper = 4};
  };
  return training;
}

TEST(ZeroOneAdam, RanksHaveTheSameParametersAfterEverySynchronisationAndTheirOwnBetween) {
  const std::vector<std::int64_t> synchronised{4, 5, 6, 8, 12, 16};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    ToyTraining training = local_steps(2, dtype);
    // The last block has no gradient in a step of synchronisation: what its ranks did before must not be forgotten.
    training.skip = [](int, std::int64_t step, int block) { return block == 2 && (step == 7 || step == 2); };
    std::mutex mutex;
    std::map<std::int64_t, std::vector<std::vector<std::vector<double>>>> after;
    training.after_step = [&](Engine&, ToyModel& model, const StepResult& step) {
      std::vector<std::vector<double>> values;
      for (int param = 0; param < static_cast<int>(model.structure().params.size()); ++param)
        values.push_back(model.value(param));
      const std::lock_guard lock(mutex);
      after[step.step].push_back(std::move(values));
    };
    const ToyOutcome outcome = train_toy(training);
    for (const StepResult& result : outcome.results) EXPECT_TRUE(result.committed);
    ASSERT_EQ(after.size(), static_cast<std::size_t>(kLastStep));
    for (const auto& [step, ranks] : after) {
      const bool same = step <= 3 || std::ranges::find(synchronised, step) != synchronised.end();
      EXPECT_EQ(ranks[0] == ranks[1], same) << name_of(dtype) << " step " << step;
    }
  }
}

TEST(ZeroOneAdam, GoesOnFromACheckpointOfASynchronisedStepAndRefusesOthers) {
  const CheckpointFolder folder;
  ToyTraining whole = local_steps(2);
  whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == 8) (void)engine.save(folder.text());
  };
  const ToyOutcome expected = train_toy(whole);
  ToyTraining resumed = local_steps(2);
  resumed.model_seed = 99;
  resumed.first_step = 8;
  resumed.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  EXPECT_EQ(train_toy(resumed).values, expected.values);
  whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == 9) (void)engine.save(folder.text());
  };
  EXPECT_THAT(message_of(whole), AllOf(HasSubstr("differ between two synchronisations"), HasSubstr("9 steps")));
  whole = local_steps(2);
  whole.plan = zero_plan(1, {"dp"});
  EXPECT_THAT(message_of(whole),
              AllOf(HasSubstr("parameters of their own"), HasSubstr("local_step_clipper"), HasSubstr("ZeRO stage 0")));
}

TEST(ZeroOneAdam, ARankAloneMakesTheStepsOfOneWithoutIntervals) {
  // Nothing is lost where nothing is sent: steps by itself, and then the mean of their momenta, are those steps but for
  // the order in which they are added up.
  ToyTraining training = local_steps(1, DType::kFloat64);
  training.clipping = 0.0;
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    for (GroupHyper& group : settings.groups) group.weight_decay = 0.0;
    settings.optimizer.zero_one = {
        .var_freeze_step = 3, .var_update_scaler = 2, .local_step_scaler = 2, .local_step_clipper = 4};
  };
  training.steps = 6;  // 4 and 5 synchronise, 6 does
  const ToyOutcome got = train_toy(training);
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    for (GroupHyper& group : settings.groups) group.weight_decay = 0.0;
    settings.optimizer.zero_one = {.var_freeze_step = 3, .var_update_scaler = 2, .local_step_clipper = 1};
  };
  EXPECT_EQ(train_toy(training).values, got.values);
}

TEST(OneBitAdam, RefusesWhatHasNoMeaning) {
  ToyTraining early = onebit(2, 2);
  early.tamper = [](int, ToyStructure&, EngineSettings& settings) { settings.update.inside_backward = true; };
  early.clipping = 0.0;
  EXPECT_THAT(message_of(early), AllOf(HasSubstr("exchange messages"), HasSubstr("inside_backward")));
  ToyTraining reads = onebit(2, 2);
  reads.steps = kFreeze + 1;
  reads.after_step = [](Engine& engine, ToyModel&, const StepResult& step) {
    if (step.step == kFreeze)
      engine.read_states({.kind = "grad"}, [](StateTensor) {});  // between steps there are none, before and after
  };
  EXPECT_THAT(message_of(reads), HasSubstr("gradients stay with their ranks"));
}

TEST(FrozenAdam, TakesAnyReductionWithTheSameBitsAtEveryStage) {
  std::vector<std::string> names = reduction_names();
  names.emplace_back("adaptive");
  for (const std::string& name : names) {
    if (name == "one_bit") continue;  // above
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int world : {2, 3}) {
        ToyOutcome expected;
        for (const int stage : {0, 2, 3}) {
          ToyTraining training = onebit(stage, world, dtype);
          training.model.width = 40;
          training.tamper = [&name](int, ToyStructure&, EngineSettings& settings) {
            settings.optimizer.freeze_step = kFreeze;
            settings.optimizer.compression = {.compression = name, .ratio = 0.1, .rank = 2};
          };
          const ToyOutcome got = train_toy(training);
          if (stage == 0) expected = got;
          const std::string where = name + " " + std::string(name_of(dtype)) + " world " + std::to_string(world) +
                                    " stage " + std::to_string(stage);
          EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
          expect_as_planned(got, where);
        }
      }
    }
  }
}

TEST(FrozenAdam, OfExactMessagesIsMomentumWithAFixedScale) {
  // With one rank there is nothing to compress: all reductions are the exact one.
  const auto last = [](const char* name, int world) {
    ToyTraining training = onebit(0, world, DType::kFloat64);
    training.data_of = [](int) { return 0; };  // the same on all ranks: their mean is that of one
    training.tamper = [name](int, ToyStructure&, EngineSettings& settings) {
      settings.optimizer.freeze_step = kFreeze;
      settings.optimizer.compression.compression = name;
    };
    return train_toy(training).values;
  };
  const std::vector<std::vector<double>> alone = last("one_bit", 1);
  for (const char* name : {"exact", "int4", "top_k"}) {
    const std::vector<std::vector<double>> got = last(name, 2);
    for (std::size_t param = 0; param < alone.size(); ++param) {
      for (std::size_t i = 0; i < alone[param].size(); ++i)
        ASSERT_NEAR(got[param][i], alone[param][i], 1e-9) << name << " parameter " << param;
    }
  }
}

TEST(FrozenAdam, RefusesAReductionThatIsNotBuilt) {
  ToyTraining training = onebit(0, 2);
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.compression.compression = "int9";
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("no such reduction"), HasSubstr("did you mean int8?")));
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.optimizer.compression = {.compression = "top_k", .ratio = 0.0};
  };
  EXPECT_THAT(message_of(training), HasSubstr("such a share of elements"));
}

TEST(FrozenAdam, ThatAdaptsSendsLessThanTheUniformLevelAndGoesOnAlike) {
  const CheckpointFolder folder;
  const auto training_with = [](const char* name, int every) {
    ToyTraining training = onebit(2, 2);
    training.model.width = 40;
    training.tamper = [name, every](int, ToyStructure&, EngineSettings& settings) {
      settings.optimizer.freeze_step = kFreeze;
      settings.optimizer.compression = {.compression = name, .every = every};
    };
    return training;
  };
  const ToyTraining adaptive = training_with("adaptive", 2);
  (void)expect_goes_on(adaptive, adaptive, 6, folder);
  const ToyOutcome got = train_toy(adaptive);
  const ToyOutcome uniform = train_toy(training_with("int4", 1));
  for (std::size_t rank = 0; rank < 2; ++rank)
    EXPECT_LE(got.planned_wire[rank].total(), uniform.planned_wire[rank].total());
}

}  // namespace
}  // namespace zeroth::test
