// Gradient coding: the gradient of all ranks' batches from any of the ranks that have them, with the same bits whoever
// is late.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

/// Waits in its first micro-step until the others have decided the step without it.
void be_late(Engine& engine) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!engine.ends_step()) {
    ZR_CHECK(std::chrono::steady_clock::now() < deadline, ErrorCode::kInternal, "the others do not decide the step",
             {});
    std::this_thread::yield();
  }
}

/// `late`: the rank that is late in each step; -1: none.
ToyTraining coded_steps(int stage, int world, int stragglers, int late, DType dtype = DType::kFloat32) {
  ToyTraining training = small(stage, world);
  training.model.dtype = dtype;
  training.micro_steps = stragglers + 1;
  training.tamper = [stragglers](int, ToyStructure&, EngineSettings& settings) { settings.stragglers = stragglers; };
  training.before_micro_step = [late](Engine& engine, ToyModel& model, int, int micro_step) {
    model.take_data_of(engine.chunks()[static_cast<std::size_t>(micro_step)]);
    if (engine.rank() == late && micro_step == 0) be_late(engine);
    return 0;
  };
  return training;
}

void expect_same_weights(const ToyOutcome& got, const ToyOutcome& expected, const std::string& where) {
  EXPECT_EQ(got.values, expected.values) << where;
  EXPECT_EQ(got.norms, expected.norms) << where;
}

TEST(GradientCode, HasTheSameBitsWhoeverIsLateAtEveryStage) {
  for (const auto& [world, stragglers] : {std::pair{4, 1}, {3, 2}, {2, 1}, {6, 2}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const ToyOutcome expected = train_toy(coded_steps(0, world, stragglers, -1, dtype));
      for (const auto& [stage, late] : {std::pair{0, 0}, {1, 1}, {2, world - 1}, {2, -1}, {0, world - 2}}) {
        ToyTraining training = coded_steps(stage, world, stragglers, late, dtype);
        if (stage == 1) training.transport = ThreadTransport::kMessages;
        const ToyOutcome got = train_toy(training);
        const std::string where = std::string(name_of(dtype)) + " world " + std::to_string(world) + " stage " +
                                  std::to_string(stage) + " late " + std::to_string(late);
        expect_same_weights(got, expected, where);
        expect_planned_memory(got, where);
        for (const StepResult& result : got.results) {
          EXPECT_TRUE(result.committed) << where;
          EXPECT_EQ(result.batches, world) << where;
          if (late >= 0) {
            EXPECT_THAT(result.left_out, Contains(late)) << where;
          }
        }
      }
    }
  }
}

TEST(GradientCode, GivesTheGradientOfAllBatches) {
  ToyTraining plain = small(0, 4);
  plain.model.dtype = DType::kFloat64;
  const ToyOutcome expected = train_toy(plain);  // rank r has batch r
  for (const int late : {-1, 0, 3}) {
    const ToyOutcome got = train_toy(coded_steps(2, 4, 1, late, DType::kFloat64));
    for (std::size_t param = 0; param < expected.values.size(); ++param) {
      for (std::size_t i = 0; i < expected.values[param].size(); ++i)
        ASSERT_NEAR(got.values[param][i], expected.values[param][i], 1e-12) << "late " << late << " param " << param;
    }
  }
}

TEST(GradientCode, ForgetsWhatARankThatIsLeftOutHasComputed) {
  const ToyOutcome expected = train_toy(coded_steps(1, 4, 1, 2));
  // Only this rank's gradients are not finite: they are in no sum.
  ToyTraining poisoned = coded_steps(1, 4, 1, 2);
  poisoned.poison = [](int rank, std::int64_t, int, int param) { return rank == 2 && param == 0; };
  const ToyOutcome got = train_toy(poisoned);
  expect_same_weights(got, expected, "a NaN of a rank that is left out");
  for (const StepResult& result : got.results) EXPECT_FALSE(result.first_offender.has_value());
}

TEST(GradientCode, GoesOnAfterDiscardedGradientsAndFromACheckpoint) {
  const CheckpointFolder folder;
  ToyTraining resumed = expect_goes_on(coded_steps(2, 4, 1, 3), coded_steps(0, 4, 1, 0), 3, folder);
  ToyTraining dropped = coded_steps(2, 4, 1, -1);
  const ToyOutcome expected = train_toy(dropped);
  dropped.before_micro_step = [before = dropped.before_micro_step](Engine& engine, ToyModel& model, int step,
                                                                   int micro_step) {
    if (step == 2 && micro_step == 0) {
      model.take_data_of(engine.rank());
      (void)model.forward_backward(step, 7);
      engine.discard_gradients();
    }
    return before(engine, model, step, micro_step);
  };
  expect_same_weights(train_toy(dropped), expected, "a step after discarded gradients");
}

TEST(GradientCode, EndsInTheMiddleOfAStepLikeAnyTraining) {
  for (const ThreadTransport transport : {ThreadTransport::kMemory, ThreadTransport::kMessages}) {
    ToyTraining training = coded_steps(1, 4, 1, -1);
    training.transport = transport;
    training.after_step = [](Engine& engine, ToyModel& model, const StepResult& result) {
      if (result.step != 6) return;
      (void)model.forward_backward(6, 0);
      EXPECT_FALSE(engine.step().boundary);
    };
    EXPECT_EQ(train_toy(training).results.size(), 6U);
  }
}

TEST(GradientCode, RefusesWhatHasNoMeaning) {
  EXPECT_THAT(message_of(coded_steps(0, 3, 1, -1)), AllOf(HasSubstr("whole groups"), HasSubstr("that 2 divides")));
  EXPECT_THAT(message_of(coded_steps(3, 4, 1, -1)),
              AllOf(HasSubstr("gathered in each micro-step"), HasSubstr("0, 1 or 2")));
  ToyTraining micro_steps = coded_steps(0, 4, 1, -1);
  micro_steps.micro_steps = 3;
  EXPECT_THAT(message_of(micro_steps), HasSubstr("set gradient_accumulation_steps to stragglers + 1"));
  ToyTraining lossy = coded_steps(0, 4, 1, -1);
  lossy.optimizer = "OneBitAdam";
  EXPECT_THAT(message_of(lossy), AllOf(HasSubstr("lossy sums"), HasSubstr("OneBitAdam")));
  // Not thrown out of the training: other ranks would hear of it first.
  ToyTraining calls = coded_steps(0, 2, 1, -1);
  calls.after_micro_step = [](Engine& engine, int, int) {
    EXPECT_THAT(text_thrown_by([&] { (void)engine.save("nowhere"); }), HasSubstr("in the middle of a step"));
    EXPECT_THAT(text_thrown_by([&] { (void)engine.end_accumulation(); }), HasSubstr("() with a gradient code"));
  };
  EXPECT_EQ(train_toy(calls).results.size(), 6U);
}

}  // namespace
}  // namespace zeroth::test
