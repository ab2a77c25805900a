// ZeRO++: gradients and parameters that travel in codes. The same bits at every stage that gathers alike and over every
// transport, memory and bytes as planned, near to the training without codes, and one that goes on from a checkpoint.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ToyTraining coded_training(int stage, int world, const WireCodes& codes, DType dtype = DType::kFloat32) {
  ToyTraining training{.plan = zero_plan(stage, {"dp"}), .world = world, .steps = 8};
  training.model = {.width = 48, .blocks = 4, .dtype = dtype, .frozen_blocks = {1}};
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.plan.codes = codes;
  return training;
}

double last_loss(const ToyOutcome& outcome) {
  return std::strtod(outcome.losses.back().c_str(), nullptr);
}

TEST(QuantizedGradients, HaveTheSameBitsAtEveryStage) {
  for (const auto& [world, node] : {std::pair{2, 0}, {3, 0}, {4, 2}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int micro_steps : {1, 3}) {
        ToyOutcome expected;
        for (const int stage : {0, 1, 2, 3}) {
          ToyTraining training = coded_training(stage, world, {.gradient_bits = 4, .node_degree = node}, dtype);
          training.micro_steps = micro_steps;
          const ToyOutcome got = train_toy(training);
          if (stage == 0) expected = got;
          const std::string where = std::string(name_of(dtype)) + " world " + std::to_string(world) + " micro-steps " +
                                    std::to_string(micro_steps) + " stage " + std::to_string(stage);
          EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
          expect_as_planned(got, where);
        }
      }
    }
  }
}

TEST(QuantizedGradients, HaveTheSameBitsOverEveryTransportAndInEveryOrder) {
  ToyTraining training = coded_training(2, 4, {.gradient_bits = 8, .node_degree = 2});
  training.per_node = 2;  // sums of vectors go along the nodes
  const ToyOutcome expected = train_toy(training);
  for (const ThreadTransport transport :
       {ThreadTransport::kMessages, ThreadTransport::kLevels, ThreadTransport::kMixed}) {
    training.transport = transport;
    const ToyOutcome got = train_toy(training);
    EXPECT_TRUE(got.same_numbers(expected)) << static_cast<int>(transport) << ": " << difference(expected, got);
  }
  for (const int stage : {0, 3}) {
    ToyTraining chaos = coded_training(stage, 3, {.parameter_bits = stage == 3 ? 8 : 0, .gradient_bits = 4});
    const ToyOutcome in_order = train_toy(chaos);
    chaos.mode = ExecutionMode::kChaos;
    for (chaos.chaos_seed = 1; chaos.chaos_seed < 5; ++chaos.chaos_seed) {
      const ToyOutcome got = train_toy(chaos);
      EXPECT_TRUE(got.same_numbers(in_order)) << "seed " << chaos.chaos_seed << ": " << difference(in_order, got);
    }
  }
}

TEST(QuantizedGradients, ComeNearToExactOnes) {
  const auto loss_of = [](const WireCodes& codes) {
    ToyTraining training = coded_training(0, 4, codes);
    training.optimizer = "SGD";  // Adam makes much of what is small
    return last_loss(train_toy(training));
  };
  const double exact = loss_of({});
  const auto distance = [&](const WireCodes& codes) { return std::fabs(loss_of(codes) - exact); };
  EXPECT_LT(distance({.gradient_bits = 8}), 0.01 * std::fabs(exact));
  EXPECT_LT(distance({.gradient_bits = 4}), 0.05 * std::fabs(exact));
  EXPECT_GT(distance({.gradient_bits = 4}), 0.0) << "no code has been used";
}

// Three levels: parameters over `parameter` ranks, sums of micro-steps over `gradient`, the optimizer over `optimizer`.
ToyTraining levels(int world, int parameter, int gradient, int optimizer, WireCodes codes = {.gradient_bits = 4}) {
  ToyTraining training = coded_training(parameter > 1 ? 3 : optimizer > 1 ? 2 : 0, world, codes);
  training.plan.gradient_degree = gradient;
  if (parameter > 1) training.plan.parameter_degree = parameter;
  if (optimizer > 1) training.plan.optimizer_degree = optimizer;
  training.micro_steps = 3;
  return training;
}

TEST(QuantizedGradients, TravelInCodesBetweenRunsOfRanksOnly) {
  struct Plan {
    int world = 4, parameter = 1, gradient = 2, optimizer = 1;
  };
  for (const std::vector<Plan>& alike :
       {std::vector<Plan>{{}, {4, 2, 2, 4}, {4, 2, 2, 2}, {4, 4, 2, 4}, {4, 1, 2, 4}, {4, 1, 2, 2}},
        {{6, 1, 3, 1}, {6, 3, 3, 6}, {6, 6, 3, 6}},
        {{4, 1, 1, 1}, {4, 2, 1, 4}, {4, 4, 1, 4}},
        {{8, 1, 4, 1}, {8, 2, 4, 8}, {8, 2, 4, 4}}}) {
    ToyOutcome expected;
    for (const Plan& plan : alike) {
      const ToyOutcome got = train_toy(levels(plan.world, plan.parameter, plan.gradient, plan.optimizer));
      const std::string where = std::to_string(plan.world) + " ranks, degrees " + std::to_string(plan.parameter) + " " +
                                std::to_string(plan.gradient) + " " + std::to_string(plan.optimizer);
      if (&plan == &alike.front()) expected = got;
      EXPECT_TRUE(got.same_numbers(expected)) << where << ": " << difference(expected, got);
      expect_as_planned(got, where);
    }
    // What runs add up by themselves has no codes: less is missed than with codes in each micro-step.
    const Plan& plain = alike.front();
    const ToyOutcome exact = train_toy(levels(plain.world, 1, plain.gradient, 1, {}));
    EXPECT_FALSE(exact.same_numbers(expected)) << "no code has been used";
  }
}

TEST(QuantizedGradients, ComposeWithDegreesOfParametersAndOptimizer) {
  const ToyOutcome expected = train_toy(coded_training(0, 4, {.gradient_bits = 4}));
  for (const auto& [parameter, optimizer] : {std::pair{2, 4}, {2, 2}, {4, 4}}) {
    ToyTraining training = coded_training(3, 4, {.gradient_bits = 4});
    training.plan.parameter_degree = parameter;
    training.plan.optimizer_degree = optimizer;
    const ToyOutcome got = train_toy(training);
    EXPECT_TRUE(got.same_numbers(expected)) << parameter << " " << optimizer << ": " << difference(expected, got);
    expect_as_planned(got, std::to_string(parameter));
  }
  // All three levels, and parameters in codes between nodes.
  ToyTraining all = levels(4, 1, 2, 1, {.parameter_bits = 8, .gradient_bits = 4, .node_degree = 2});
  all.plan = coded_training(3, 4, all.plan.codes).plan;
  all.plan.gradient_degree = 2;
  expect_as_planned(train_toy(all), "parameters in codes");
}

TEST(QuantizedGradients, BetweenRunsSaveBytesOfTheFarLink) {
  const auto far = [](const WireCodes& codes) {
    ToyTraining training = levels(4, 2, 2, 4, codes);
    training.per_node = 2;
    training.reports_memory = false;
    std::uint64_t bytes = 0;
    for (const std::uint64_t one : train_toy(training).far_reduce_bytes) bytes += one;
    return static_cast<double>(bytes);
  };
  EXPECT_LT(far({.gradient_bits = 4}), far({}) / 5) << "4 bits and scales for 32";
}

TEST(QuantizedGradients, OfRunsGoOnFromACheckpointAndSurviveOrders) {
  const CheckpointFolder folder;
  (void)expect_goes_on(levels(4, 2, 2, 4), levels(4, 1, 2, 1), 4, folder);
  ToyTraining chaos = levels(4, 2, 2, 4);
  const ToyOutcome in_order = train_toy(chaos);
  chaos.mode = ExecutionMode::kChaos;
  for (chaos.chaos_seed = 1; chaos.chaos_seed < 4; ++chaos.chaos_seed) {
    const ToyOutcome got = train_toy(chaos);
    EXPECT_TRUE(got.same_numbers(in_order)) << "seed " << chaos.chaos_seed << ": " << difference(in_order, got);
  }
}

TEST(QuantizedWeights, AreGatheredAsPlanned) {
  for (const auto& [world, node] : {std::pair{2, 0}, {3, 0}, {4, 2}, {4, 4}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
      for (const int bits : {0, 4}) {
        ToyTraining training =
            coded_training(3, world, {.parameter_bits = 8, .gradient_bits = bits, .node_degree = node}, dtype);
        training.optimizer = "SGD";
        training.plan.reshard = world == 4 ? Reshard::kAll : Reshard::kDefault;
        const ToyOutcome got = train_toy(training);
        const std::string where = std::string(name_of(dtype)) + " world " + std::to_string(world) + " nodes of " +
                                  std::to_string(node) + " bits " + std::to_string(bits);
        expect_as_planned(got, where);
        ToyTraining plain = coded_training(3, world, {}, dtype);
        plain.optimizer = "SGD";
        const double exact = last_loss(train_toy(plain));
        EXPECT_LT(std::fabs(last_loss(got) - exact), 0.05 * std::fabs(exact)) << where;
        if (dtype == DType::kFloat64) {
          EXPECT_NEAR(last_loss(got), exact, 1e-12) << "float64 travels as it is, in other blocks of the norm";
        }
      }
    }
  }
}

TEST(QuantizedWeights, OfANodeComeOverTheLinkOnceAStep) {
  const auto far = [](const WireCodes& codes, int parameter_degree) {
    ToyTraining training = coded_training(3, 4, codes);
    training.per_node = 2;
    training.plan.reshard = Reshard::kAll;
    training.plan.parameter_degree = parameter_degree;
    training.reports_memory = false;
    const ToyOutcome got = train_toy(training);
    std::uint64_t bytes = 0;
    for (const std::uint64_t one : got.far_gather_bytes) bytes += one;
    for (const std::uint64_t one : got.far_reduce_bytes) bytes += one;
    return static_cast<double>(bytes);
  };
  const double plain = far({}, 0);
  // float32: a reduction of 4 bits instead of 32, one gather of 8 bits instead of two of 32.
  EXPECT_LT(far({.parameter_bits = 8, .gradient_bits = 4, .node_degree = 2}, 0), plain / 6);
  EXPECT_LT(far({.parameter_bits = 8, .node_degree = 2}, 0), plain * 0.75);
  EXPECT_LT(far({.gradient_bits = 4, .node_degree = 2}, 2), plain * 0.75) << "with hpZ";
  EXPECT_LT(far({.gradient_bits = 4, .node_degree = 2}, 0), plain * 0.75);
  EXPECT_LT(far({.gradient_bits = 4}, 0), plain);
}

TEST(QuantizedGradients, GoOnFromACheckpointWithTheirErrors) {
  for (const auto& [from, to] : {std::pair{3, 0}, {0, 2}}) {
    const CheckpointFolder folder;
    const ToyTraining resumed = expect_goes_on(coded_training(from, 2, {.gradient_bits = 4}),
                                               coded_training(to, 2, {.gradient_bits = 4}), 4, folder);
    ToyTraining other = resumed;  // ranks have errors of their own: others begin without
    other.world = 3;
    EXPECT_TRUE(train_toy(other).results.back().committed);
    ToyTraining without = resumed;
    without.plan.codes = {};
    EXPECT_TRUE(train_toy(without).results.back().committed);
  }
}

TEST(QuantizedGradients, WithANanSkipTheStep) {
  for (const int stage : {0, 3}) {
    ToyTraining poisoned = coded_training(stage, 2, {.gradient_bits = 4});
    poisoned.poison = [](int rank, std::int64_t step, int, int param) { return rank == 1 && step == 5 && param == 0; };
    const ToyOutcome got = train_toy(poisoned);
    int committed = 0;
    for (const StepResult& result : got.results) committed += result.committed ? 1 : 0;
    EXPECT_EQ(committed, 7);
    for (const std::vector<double>& values : got.values) {
      for (const double value : values) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

TEST(QuantizedGradients, RefuseWhatHasNoMeaning) {
  ToyTraining messages = coded_training(2, 2, {.gradient_bits = 4});
  messages.optimizer = "OneBitAdam";
  EXPECT_THAT(message_of(messages), AllOf(HasSubstr("in codes"), HasSubstr("OneBitAdam")));
  ToyTraining gathers = coded_training(2, 2, {.parameter_bits = 8});
  EXPECT_THAT(message_of(gathers), HasSubstr("codes of parameters that are not gathered"));
  ToyTraining degrees = coded_training(3, 4, {.parameter_bits = 8});
  degrees.plan.gradient_degree = 2;
  EXPECT_THAT(message_of(degrees), AllOf(HasSubstr("inside of the gather"), HasSubstr("zero_hpz_partition_size to")));
  degrees = coded_training(2, 6, {.gradient_bits = 4, .node_degree = 2});
  degrees.plan.gradient_degree = 3;
  EXPECT_THAT(message_of(degrees), AllOf(HasSubstr("along such nodes"), HasSubstr("nodes of 2")));
  ToyTraining nodes = coded_training(3, 4, {.gradient_bits = 4, .node_degree = 3});
  EXPECT_THAT(message_of(nodes), AllOf(HasSubstr("whole nodes"), HasSubstr("zero_hpz_partition_size")));
  ToyTraining bits = coded_training(3, 2, {.gradient_bits = 3});
  EXPECT_THAT(message_of(bits), AllOf(HasSubstr("such codes"), HasSubstr("3 bits")));
  ToyTraining differ = coded_training(3, 2, {.gradient_bits = 4});
  differ.tamper = [](int rank, ToyStructure&, EngineSettings& settings) {
    settings.plan.codes.block = rank == 0 ? 256 : 128;
  };
  EXPECT_THAT(message_of(differ), AllOf(HasSubstr("MISMATCH"), HasSubstr("blocks of 128")));
}

}  // namespace
}  // namespace zeroth::test
