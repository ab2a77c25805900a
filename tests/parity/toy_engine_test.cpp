// The engine on the toy model: what it computes, what it says, what it refuses, and what must not disturb it.
#include "toy_engine.h"

#include "comm/decorators/faulty_backend.h"
#include "support/sanitizer.h"

#include <kernels/common/dispatch.h>
#include <zeroth/comm/decorators.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ToyEngine, AUnitThatSomeRanksSkipIsNamedWhereCallsAreMatched) {
  for (const int stage : {0, 1, 3}) {
    ToyTraining training = small(stage, 3);
    training.transport = ThreadTransport::kMessages;
    training.skip = [](int rank, std::int64_t step, int block) { return rank == 1 && step == 2 && block == 3; };
    const std::string message = message_of(training);
    EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks make different calls"));
    EXPECT_THAT(message, HasSubstr(stage == 3 ? "the parameters of unit blocks.3" : "the gradients of unit blocks.3"));
    EXPECT_THAT(message, HasSubstr("on rank 1"));
  }
}

TEST(ToyEngine, ARankThatComesToAnotherCallIsNamedWhereCallsAreMatched) {
  ToyTraining training = small(1, 2);
  training.transport = ThreadTransport::kMessages;
  training.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step != 2) return;
    if (engine.rank() == 0) engine.barrier();
    (void)engine.average(1.0);
  };
  const std::string message = message_of(training);
  EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks make different calls"));
  EXPECT_THAT(message, HasSubstr("barrier() on rank 0"));
  EXPECT_THAT(message, HasSubstr("average() on rank 1"));
}

TEST(ToyEngine, BarriersOfDifferentNamesAreAMismatchWithBoth) {
  for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
    ToyTraining training = small(1, 2);
    training.transport = transport;
    training.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
      engine.barrier();
      engine.barrier("after a step");
      if (result.step == 2) engine.barrier(engine.rank() == 0 ? "before the export" : "before the end");
    };
    const std::string message = message_of(training);
    EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks make different calls"));
    EXPECT_THAT(message, HasSubstr("\"before the export\""));
    EXPECT_THAT(message, HasSubstr("\"before the end\""));
  }
}

TEST(ToyEngine, AveragesThatOneRankSwapsAreAMismatchWithBothNames) {
  for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
    ToyTraining training = small(1, 2);
    training.transport = transport;
    training.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
      EXPECT_EQ(engine.average(engine.rank(), "rank"), 0.5);
      if (result.step < 2) return;
      const bool swaps = engine.rank() == 1;
      (void)engine.average(1.0, swaps ? "the accuracy" : "the loss");
      (void)engine.average(1.0, swaps ? "the loss" : "the accuracy");
    };
    const std::string message = message_of(training);
    EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks make different calls"));
    EXPECT_THAT(message, AllOf(HasSubstr("average() on rank 0"), HasSubstr("average() on rank 1")));
    EXPECT_THAT(message, HasSubstr("\"the loss\""));
    EXPECT_THAT(message, HasSubstr("\"the accuracy\""));
  }
}

TEST(ToyEngine, AnAverageThatOneRankNamesIsAnotherCallThanOneWithoutAName) {
  for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
    ToyTraining training = small(1, 2);
    training.transport = transport;
    training.after_step = [](Engine& engine, ToyModel&, const StepResult&) {
      (void)engine.average(1.0, engine.rank() == 0 ? "the loss" : "");
    };
    const std::string message = message_of(training);
    EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks make different calls"));
    EXPECT_THAT(message, HasSubstr("\"the loss\""));
  }
}

TEST(ToyEngine, RanksThatSetOtherLearningRatesAreNamed) {
  ToyTraining training = small(2, 3);
  training.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
    GroupHyper hyper = engine.settings().groups[0];
    hyper.lr *= engine.rank() == 2 && result.step == 3 ? 0.5 : 0.9;
    engine.set_group(0, hyper);
  };
  const std::string message = message_of(training);
  EXPECT_THAT(message, HasSubstr("[MISMATCH] ranks set different hyper-parameters"));
  EXPECT_THAT(message, HasSubstr("who: rank 2/3; which: lr of parameter group 0; expected: 0.01458"));
  EXPECT_THAT(message, ::testing::ContainsRegex("expected: [0-9.]+ .rank 0.; got: [0-9.]+ .rank 2.;"));
  training.after_step = [](Engine& engine, ToyModel&, const StepResult&) { engine.set_group(2, {}); };
  EXPECT_THAT(message_of(training), HasSubstr("[USAGE] there is no such parameter group"));
}

TEST(ToyEngine, OptimizersAndThreadsGiveTheSameBitsAtEveryStage) {
  for (const char* optimizer : {"AdamW", "Adam", "SGD", "Lion", "Lamb"}) {
    ToyTraining training = small(0, 2);
    training.optimizer = optimizer;
    const ToyOutcome expected = train_toy(training);
    for (int stage = 0; stage <= 3; ++stage) {
      for (const int threads : {1, 2}) {
        training.plan = zero_plan(stage, {"dp"});
        training.threads = threads;
        EXPECT_EQ(difference(expected, train_toy(training)), "")
            << optimizer << " stage " << stage << " threads " << threads;
      }
    }
  }
}

TEST(ToyEngine, GradientFactorsEnterNormAndUpdateAlike) {
  const auto with_factor = [](double factor, int stage) {
    ToyTraining training = small(stage, 2);
    training.optimizer = "SGD";
    training.tamper = [factor](int, ToyStructure& structure, EngineSettings& settings) {
      for (ParamSpec& param : structure.params) param.grad_factor = factor;
      for (GroupHyper& group : settings.groups) {
        group.lr /= factor;
        group.weight_decay *= factor;
      }
      settings.gradient_clipping = 0;
    };
    return train_toy(training);
  };
  // Half the gradient at twice the rate is the same training, to the bit, for a power of two; the norm is half.
  const ToyOutcome whole = with_factor(1.0, 0);
  for (int stage = 0; stage <= 3; ++stage) {
    const ToyOutcome half = with_factor(0.5, stage);
    EXPECT_EQ(half.losses, whole.losses) << "stage " << stage;
    for (std::size_t step = 0; step < half.norms.size(); ++step) {
      EXPECT_EQ(2 * std::stod(half.norms[step]), std::stod(whole.norms[step])) << "stage " << stage;
    }
  }
}

TEST(ToyEngine, RunsAreRepeatable) {
  const ToyTraining training = small(3, 3);
  EXPECT_EQ(difference(train_toy(training), train_toy(training)), "");
}

TEST(ToyEngine, LossFalls) {
  ToyTraining training = small(3, 2);
  training.steps = 40;
  const ToyOutcome outcome = train_toy(training);
  EXPECT_LT(std::stod(outcome.losses.back()), 0.5 * std::stod(outcome.losses.front()));
  EXPECT_GT(std::stod(outcome.norms.front()), 0.0);
}

TEST(ToyEngine, LossesHaveTheGoldenBits) {
  // The build runs this once for each instruction set; the variable is then what decides.
  if (const char* asked = std::getenv("ZEROTH_ISA"); asked != nullptr) {
    for (const kernels::Isa isa : {kernels::Isa::kScalar, kernels::Isa::kAvx2, kernels::Isa::kAvx512}) {
      if (asked != kernels::name_of(isa)) continue;
      if (!kernels::is_supported(isa)) GTEST_SKIP() << "no " << (isa == kernels::Isa::kAvx2 ? "AVX2" : "AVX-512");
      ASSERT_EQ(kernels::best_isa(), isa);
    }
  }
  // Our own kernels and IEEE operations only: the same bits on every machine and instruction set. If a change of
  // numbers is meant, the new file is what this test prints.
  std::map<std::string, std::string> golden;
  std::ifstream file(ZEROTH_GOLDEN_FILE);
  for (std::string name, losses; file >> name && std::getline(file, losses);) golden[name] = losses;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const int world : {1, 2, 3}) {
      ToyTraining training = small(3, world);
      training.model.dtype = dtype;
      std::ostringstream line;
      for (const std::string& loss : train_toy(training).losses) line << " " << loss;
      const std::string name = std::string(name_of(dtype)) + "_world" + std::to_string(world);
      EXPECT_EQ(line.str(), golden[name]) << name;
    }
  }
}

TEST(ToyEngine, NonFiniteGradientSkipsTheStepOnAllRanksAndNamesTheFirstOffender) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyTraining training = small(stage, 3);
    training.micro_steps = 2;
    training.poison = [](int rank, std::int64_t step, int micro_step, int param) {
      return step == 2 &&
             ((rank == 2 && micro_step == 0 && param == 4) || (rank == 0 && micro_step == 1 && param == 1));
    };
    const ToyOutcome outcome = train_toy(training);
    const StepResult& skipped = outcome.results[2];
    EXPECT_FALSE(skipped.committed);
    EXPECT_EQ(skipped.cause, SkipCause::kNonFinite);
    ASSERT_TRUE(skipped.first_offender);
    EXPECT_EQ(skipped.first_offender->param, "blocks.0.bias");
    EXPECT_EQ(skipped.first_offender->rank, 2);
    EXPECT_EQ(skipped.first_offender->micro_step, 0);
    EXPECT_EQ(skipped.first_offender->count, 1U);
    EXPECT_TRUE(outcome.results[3].committed);
    EXPECT_EQ(outcome.results.back().step, training.steps - 1);
  }
}

TEST(ToyEngine, TrainingStopsAfterTooManyNonFiniteSteps) {
  ToyTraining training = small(2, 2);
  training.max_nonfinite_steps = 3;
  training.poison = [](int rank, std::int64_t, int, int param) { return rank == 1 && param == 3; };
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[NONFINITE] 3 steps in a row"), HasSubstr("blocks.0.weight"), HasSubstr("rank 1")));
  // Where a loss scale looks for the largest that does not overflow, it is none of the training's faults.
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.loss_scaling = {.enabled = true, .hysteresis = 3};
  };
  const ToyOutcome outcome = train_toy(training);
  ASSERT_EQ(outcome.results.size(), 6U);
  for (const StepResult& result : outcome.results) {
    EXPECT_EQ(name_of(result.cause), "overflow");
    EXPECT_FALSE(result.committed);
  }
}

TEST(ToyEngine, RanksThatDifferAreNamedWithTheParameter) {
  ToyTraining training = small(1, 3);
  training.tamper = [](int rank, ToyStructure& structure, EngineSettings&) {
    if (rank == 2) structure.params[4].dtype = DType::kFloat64;
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("rank 2/3"),
                                          HasSubstr("blocks.0.bias float32"), HasSubstr("float64")));
  training.tamper = [](int rank, ToyStructure&, EngineSettings& settings) {
    if (rank == 1) settings.groups[1].lr = 0.5;
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("rank 1/3"), HasSubstr("group 1 lr")));
  training.tamper = [](int rank, ToyStructure&, EngineSettings& settings) {
    if (rank == 1) settings.plan = zero_plan(3, {"dp"});
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("rank 1/3"), HasSubstr("plan Flat")));
}

TEST(ToyEngine, EverySettingThatDecidesNumbersIsCompared) {
  using Change = std::function<void(ToyStructure&, EngineSettings&)>;
  const std::vector<std::pair<std::string, Change>> changes{
      {"grad_factor", [](ToyStructure& structure, EngineSettings&) { structure.params[3].grad_factor = 0.5; }},
      {"dampening", [](ToyStructure&, EngineSettings& settings) { settings.groups[0].dampening = 0.1; }},
      {"nesterov", [](ToyStructure&, EngineSettings& settings) { settings.groups[0].nesterov = true; }},
      {"betas", [](ToyStructure&, EngineSettings& settings) { settings.groups[0].beta2 = 0.5; }},
      {"eps", [](ToyStructure&, EngineSettings& settings) { settings.groups[0].eps = 0.5; }},
      {"weight_decay", [](ToyStructure&, EngineSettings& settings) { settings.groups[1].weight_decay = 0.5; }},
      {"optimizer", [](ToyStructure&, EngineSettings& settings) { settings.optimizer.momentum = true; }},
      {"schedule", [](ToyStructure&, EngineSettings& settings) { settings.schedule.warmup_start = 0.5; }},
      {"schedule", [](ToyStructure&, EngineSettings& settings) { settings.schedule.logarithmic = true; }},
      {"schedule", [](ToyStructure&, EngineSettings& settings) { settings.schedule.floor = 0.5; }},
      {"max_nonfinite_steps", [](ToyStructure&, EngineSettings& settings) { settings.max_nonfinite_steps = 3; }},
      {"loss_scaling", [](ToyStructure&, EngineSettings& settings) { settings.loss_scaling.enabled = true; }},
      {"gradient_clipping", [](ToyStructure&, EngineSettings& settings) { settings.gradient_clipping = 2.0; }},
      {"micro_steps", [](ToyStructure&, EngineSettings& settings) { settings.micro_steps = 2; }},
      {"threads", [](ToyStructure&, EngineSettings& settings) { settings.threads = 2; }},
      {"ring_slots", [](ToyStructure&, EngineSettings& settings) { settings.plan.ring_slots = 3; }},
      {"optimizer_degree 1", [](ToyStructure&, EngineSettings& settings) { settings.plan.optimizer_degree = 1; }},
  };
  for (const auto& [word, change] : changes) {
    ToyTraining training = small(1, 2);
    training.tamper = [&change](int rank, ToyStructure& structure, EngineSettings& settings) {
      if (rank == 1) change(structure, settings);
    };
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("rank 1/2"), HasSubstr(word)));
  }
}

TEST(ToyEngine, VersionsConfigurationAndPlanAreComparedBeforeTheFirstStep) {
  struct Case {
    std::function<void(EngineSettings&)> change;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {[](EngineSettings& settings) { settings.version = "0.0.9"; },
       {"ranks run different versions of Zeroth", "(rank 0)", "got: version 0.0.9 (rank 2)"}},
      {[](EngineSettings& settings) { settings.libraries = "torch 2.3.1"; },
       {"ranks compute with different versions of a library", "expected: torch 2.4.0 (rank 0)",
        "got: torch 2.3.1 (rank 2)"}},
      {[](EngineSettings& settings) { settings.libraries.clear(); },
       {"expected: torch 2.4.0 (rank 0)", "got: none (rank 2)"}},
      {[](EngineSettings& settings) { settings.configuration = R"({"train_batch_size": 12})"; },
       {"ranks do not have the same configuration", "/train_batch_size: 6 here, 12 there"}},
      {[](EngineSettings& settings) { settings.plan = zero_plan(2, {"dp"}); },
       {"ranks do not train the same thing", "(rank 2)", "plan Replicate Flat Flat"}},
  };
  for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
    for (const Case& expected : cases) {
      ToyTraining training = small(1, 3);
      training.transport = transport;
      std::atomic<int> steps{0};
      training.after_step = [&steps](Engine&, ToyModel&, const StepResult&) { ++steps; };
      training.tamper = [&expected](int rank, ToyStructure&, EngineSettings& settings) {
        settings.configuration = R"({"train_batch_size": 6})";
        settings.libraries = "torch 2.4.0";
        if (rank == 2) expected.change(settings);
      };
      const std::string message = message_of(training);
      EXPECT_THAT(message, AllOf(HasSubstr("[MISMATCH]"), HasSubstr("who: rank 2/3")));
      for (const std::string& word : expected.words) EXPECT_THAT(message, HasSubstr(word));
      EXPECT_EQ(steps, 0);
    }
  }
}

TEST(ToyEngine, RanksThatSplitParametersOverOtherGroupsAreNamed) {
  ToyTraining training = small(3, 2);
  training.tamper = [](int rank, ToyStructure&, EngineSettings& settings) {
    if (rank == 1) settings.plan.parameter_degree = 1;
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("rank 1/2"),
                                          HasSubstr("parameter_degree 0"), HasSubstr("parameter_degree 1")));
}

TEST(ToyEngine, ARankOrAWholeGroupThatSkipsAUnitIsNamedWhereCallsAreMatched) {
  for (const ShardingPlan& plan : {hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"})}) {
    for (const int first_to_skip : {3, 2}) {
      ToyTraining training = small(3, 4);
      training.plan = plan;
      training.transport = ThreadTransport::kLevels;
      training.per_node = 2;
      training.skip = [first_to_skip](int rank, std::int64_t step, int block) {
        return rank >= first_to_skip && step == 1 && block == 2;
      };
      EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("unit blocks.2")))
          << plan.name << " " << first_to_skip;
    }
  }
}

TEST(ToyEngine, DegreesThatDoNotDivideTheRanksAreRefused) {
  ToyTraining training = small(3, 4);
  training.plan = hsdp_plan(3, {"dp"});
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[CONFIG]"), HasSubstr("hsdp-3"), HasSubstr("the 4 ranks"), HasSubstr("over 3")));
}

TEST(ToyEngine, AGradientOfAFrozenParameterIsRefused) {
  ToyTraining training = small(1, 2);
  training.tamper = [](int, ToyStructure& structure, EngineSettings&) {
    for (ParamSpec& param : structure.params) param.trainable = false;
  };
  EXPECT_THAT(message_of(training), HasSubstr("[USAGE] a gradient of a parameter that never trains"));
}

TEST(ToyEngine, StepWithoutBackwardIsAnError) {
  ToyTraining training = small(3, 1);
  training.after_step = [](Engine& engine, ToyModel&, const StepResult&) { (void)engine.step(); };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[USAGE]"), HasSubstr("step() without a backward")));
}

TEST(ToyEngine, StepWithoutBackwardOnOneRankIsAnErrorOnAllAndChangesNothing) {
  for (const auto& [micro_steps, policy] : {std::pair{1, ReductionPolicy::kPerMicroStep},
                                            {2, ReductionPolicy::kPerMicroStep},
                                            {2, ReductionPolicy::kPerStep}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      ToyTraining training = small(stage, 3);
      training.micro_steps = micro_steps;
      training.plan.policy = policy;
      const ToyOutcome expected = train_toy(training);
      std::atomic<int> refusals{0};
      training.after_step = [&refusals, micro_steps = micro_steps](Engine& engine, ToyModel& model,
                                                                   const StepResult& result) {
        if (!result.boundary || result.step != 3) return;
        for (int micro_step = 0; micro_step + 1 < micro_steps; ++micro_step) {
          (void)model.forward_backward(70, micro_step);
          (void)engine.step();
        }
        if (engine.rank() != 1) (void)model.forward_backward(70, micro_steps - 1);
        try {
          (void)engine.step();
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kUsage);
          EXPECT_THAT(error.what(), AllOf(HasSubstr("without a backward"), HasSubstr("rank 1/3")));
          ++refusals;
        }
      };
      const ToyOutcome got = train_toy(training);
      EXPECT_EQ(refusals, 3) << "stage " << stage;
      EXPECT_TRUE(expected.same_numbers(got)) << "stage " << stage << "\n" << difference(expected, got);
    }
  }
}

TEST(ToyEngine, DiscardedGradientsLeaveNoTrace) {
  for (const auto& [micro_steps, policy] : {std::pair{1, ReductionPolicy::kPerMicroStep},
                                            {3, ReductionPolicy::kPerMicroStep},
                                            {3, ReductionPolicy::kPerStep}}) {
    for (int stage = 0; stage <= 3; ++stage) {
      ToyTraining training = small(stage, 3);
      training.micro_steps = micro_steps;
      training.plan.policy = policy;
      const ToyOutcome expected = train_toy(training);
      training.after_step = [micro_steps = micro_steps](Engine& engine, ToyModel& model, const StepResult& result) {
        if (!result.boundary || result.step != 2) return;
        for (int backward = 0; backward < 3; ++backward) (void)model.forward_backward(70, 0);
        EXPECT_TRUE(engine.has_gradients());
        engine.discard_gradients();
        EXPECT_FALSE(engine.has_gradients());
        engine.discard_gradients();  // of nothing
        if (micro_steps == 1) return;
        (void)model.forward_backward(71, 0);
        (void)engine.step();
        engine.discard_gradients();  // of the accumulation, which begins anew
        (void)model.forward_backward(71, 0);
        (void)engine.step();
        EXPECT_THAT(text_thrown_by([&engine] { engine.discard_gradients(); }),
                    AllOf(HasSubstr("[USAGE]"), HasSubstr("1 of 3 micro-steps dropped, for the second time")));
        (void)model.forward_backward(71, 1);
        if (engine.rank() == 0) engine.abandon(/*in_backward=*/true);  // so that this step is skipped
        (void)engine.step();
        (void)model.forward_backward(71, 2);
        EXPECT_FALSE(engine.step().committed);
      };
      const ToyOutcome got = train_toy(training);
      EXPECT_TRUE(expected.same_numbers(got)) << "stage " << stage << "\n" << difference(expected, got);
    }
  }
}

TEST(ToyEngine, ADiscardOnSomeRanksIsAMismatchOnAll) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyTraining training = small(stage, 3);
    const ToyOutcome expected = train_toy(training);
    std::atomic<int> refusals{0};
    training.after_step = [&refusals](Engine& engine, ToyModel& model, const StepResult& result) {
      if (result.step != 2) return;
      (void)model.forward_backward(70, 0);
      try {
        if (engine.rank() == 1) {
          engine.discard_gradients();
        } else {
          (void)engine.step();
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kMismatch);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("zero_grad() on rank 1/3"), HasSubstr("step() on rank 0/3")));
        ++refusals;
      }
    };
    const ToyOutcome got = train_toy(training);
    EXPECT_EQ(refusals, 3) << "stage " << stage;
    EXPECT_TRUE(expected.same_numbers(got)) << "stage " << stage << "\n" << difference(expected, got);
  }
}

TEST(ToyEngine, EvaluationBetweenStepsChangesNothing) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyTraining training = small(stage, 2);
    const ToyOutcome expected = train_toy(training);
    training.after_step = [](Engine& engine, ToyModel& model, const StepResult&) {
      // One rank alone: a gather asks nothing of the others.
      if (engine.rank() == 1) (void)model.evaluate(100, 0);
      engine.barrier();
    };
    const ToyOutcome got = train_toy(training);
    EXPECT_EQ(difference(expected, got), "") << "stage " << stage;
  }
}

TEST(ToyEngine, RanksThatTakeOppositePathsNeitherWaitNorDiffer) {
  // Even blocks on even ranks, odd blocks on odd ranks, and slots for two: each rank needs slots that wait for the
  // others.
  for (const int world : {2, 3, 4}) {
    ToyTraining training = small(0, world);
    training.model.blocks = 8;
    training.skip = [](int rank, std::int64_t, int block) { return (rank + block) % 2 == 0; };
    const ToyOutcome expected = train_toy(training);
    for (int stage = 1; stage <= 3; ++stage) {
      training.plan = zero_plan(stage, {"dp"});
      const ToyOutcome got = train_toy(training);
      EXPECT_EQ(difference(expected, got), "") << "stage " << stage << " world " << world;
      if (stage >= 2) {
        std::uint64_t spills = 0;
        for (const MemoryReport& report : got.memory) spills += report.spills;
        EXPECT_GT(spills, 0U) << "stage " << stage << " world " << world;
      }
    }
  }
}

void expect_random_paths_equal(int steps) {
  ToyTraining training{.reports_memory = false};
  training.model = {.inputs = 3, .width = 7, .blocks = 6, .batch = 1};
  training.world = 3;
  training.steps = steps;
  training.skip = random_paths(20'261'123);
  const ToyOutcome expected = train_toy(training);
  for (int stage = 1; stage <= 3; ++stage) {
    training.plan = zero_plan(stage, {"dp"});
    EXPECT_EQ(difference(expected, train_toy(training)), "") << "stage " << stage;
  }
}

TEST(ToyEngine, RandomPathsOverAHundredStepsEqualTheReference) {
  expect_random_paths_equal(100);
}

TEST(LongToyEngine, RandomPathsOverAThousandStepsEqualTheReference) {
  expect_random_paths_equal(1'000);
}

TEST(ToyEngine, ABrokenBackwardSkipsTheStepOnAllRanks) {
  ToyTraining training = small(3, 2);
  training.steps = 3;
  training.after_step = [](Engine& engine, ToyModel& model, const StepResult& result) {
    if (result.step != 1) return;
    (void)model.forward_backward(50, 0);
    if (engine.rank() == 1) engine.abandon(/*in_backward=*/true);
    const StepResult broken = engine.step();
    EXPECT_FALSE(broken.committed);
    EXPECT_EQ(broken.reason, "backward failed on rank 1");
  };
  EXPECT_TRUE(train_toy(training).results.back().committed);
}

TEST(ToyEngine, DelaysChangeNothing) {
  ToyTraining training = small(0, 3);
  const ToyOutcome expected = train_toy(training);
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    training.plan = zero_plan(static_cast<int>(seed % 4), {"dp"});
    training.mode = ExecutionMode::kChaos;
    training.chaos_seed = seed;
    training.decorate = [seed](std::unique_ptr<CommBackend> inner, int rank) -> std::unique_ptr<CommBackend> {
      return std::make_unique<FaultyBackend>(
          std::move(inner), FaultPlan{.seed = seed * 100 + static_cast<std::uint64_t>(rank), .delay_probability = 0.3});
    };
    EXPECT_EQ(difference(expected, train_toy(training)), "") << "seed " << seed;
  }
}

void expect_bits_of_an_inline_run(std::uint64_t first_seed, std::uint64_t seeds) {
  ToyTraining training{.reports_memory = false};
  training.model = {.inputs = 2, .width = 3, .blocks = 3, .batch = 1};
  training.steps = 2;
  training.skip = [](int rank, std::int64_t step, int block) { return (rank * 7 + step * 3 + block) % 5 == 0; };
  std::map<int, ToyOutcome> expected;
  for (const int world : {1, 2, 3}) {
    training.world = world;
    expected[world] = train_toy(training);  // stage 0, inline: nothing of it is left to luck
  }
  training.mode = ExecutionMode::kChaos;
  for (std::uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    training.world = 1 + static_cast<int>(seed % 3);
    training.chaos_seed = seed;
    training.plan = zero_plan(static_cast<int>(seed / 3 % 4), {"dp"});
    training.plan.prefetch_units = 1 + static_cast<int>(seed / 12 % 2);
    training.plan.ring_slots = 2 + static_cast<int>(seed / 24 % 2);
    ASSERT_EQ(difference(expected[training.world], train_toy(training)), "") << "chaos seed " << seed;
  }
}

TEST(LongToyEngine, AThousandSeedsOfChaosGiveTheBitsOfAnInlineRun) {
  expect_bits_of_an_inline_run(0, 1000);
}

TEST(ToyEngine, AHundredSeedsOfChaosGiveTheBitsOfAnInlineRun) {
  expect_bits_of_an_inline_run(1000, 100);
}

}  // namespace
}  // namespace zeroth::test
