// What the engine uses on the toy model, memory and wire, beside what its plans say; and what does not fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include <zeroth/base/text.h>

#include "toy_engine.h"

namespace zeroth::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(ToyEngine, MeasuredMemoryIsThePlannedMemory) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& [world, messages] : kTransports) {
      ToyTraining training = small(stage, world);
      training.transport = messages ? test::ThreadTransport::kMessages : test::ThreadTransport::kMemory;
      const ToyOutcome outcome = train_toy(training);
      for (const MemoryReport& report : outcome.memory) {
        EXPECT_EQ(report.planned, report.measured_peak) << "stage " << stage << " world " << world << "\n" << to_text(report);
        EXPECT_EQ(report.live.total(), report.measured_peak.total());
        EXPECT_EQ(report.overflow_slots, 0U);
        EXPECT_EQ(report.spills, 0U);
      }
    }
  }
}

TEST(ToyEngine, SixteenBitBucketsTakeHalfAndSumsOfSeveralGradientsGoBeyondThePlan) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& [world, messages] : kTransports) {
      ToyTraining training = small(stage, world);
      training.transport = messages ? test::ThreadTransport::kMessages : test::ThreadTransport::kMemory;
      training.model.dtype = DType::kBFloat16;
      training.model.round_gradients = true;
      const ToyOutcome outcome = train_toy(training);
      ToyTraining wide = training;
      wide.plan.narrow_buckets = false;
      const ToyOutcome whole = train_toy(wide);
      EXPECT_EQ(difference(whole, outcome), "") << "stage " << stage << " world " << world << " messages " << messages;
      std::uint64_t less = 0;
      for (std::size_t rank = 0; rank < outcome.memory.size(); ++rank) {
        const MemoryReport& report = outcome.memory[rank];
        EXPECT_EQ(report.planned, report.measured_peak) << "stage " << stage << " world " << world << "\n" << to_text(report);
        EXPECT_EQ(outcome.reduce_bytes[rank], outcome.planned_wire[rank].reduce_gradients);
        EXPECT_EQ(whole.reduce_bytes[rank], whole.planned_wire[rank].reduce_gradients);
        less += whole.reduce_bytes[rank] - outcome.reduce_bytes[rank];
      }
      EXPECT_EQ(less > 0, stage > 0 && world > 1);
      training.model.wide_rank = 0;
      wide.model.wide_rank = 0;
      const ToyOutcome mixed = train_toy(training);
      EXPECT_EQ(difference(train_toy(wide), mixed), "") << "stage " << stage << " world " << world << " messages " << messages;
      for (std::size_t rank = 0; rank < mixed.memory.size(); ++rank) {
        const MemoryReport& report = mixed.memory[rank];
        const bool beyond = rank == 0 && stage > 0 && world > 1;
        EXPECT_EQ(report.measured_peak[MemoryState::kOverflow] > 0, beyond) << "stage " << stage << " rank " << rank << "\n" << to_text(report);
      }
    }
  }
}

TEST(ToyEngine, SumsLeaveTheirBucketsForASecondBackwardOfAStep) {
  for (const auto& [world, messages] : kTransports) {
    ToyTraining training = small(3, world);
    training.transport = messages ? test::ThreadTransport::kMessages : test::ThreadTransport::kMemory;
    training.passes = 2;
    training.steps = 4;
    if (!messages) {  // ranks take part in the first backward only, in the second only, in both, in none
      training.skip = [](int rank, std::int64_t pass, int block) { return (rank + block + pass) % 3 == 0 || (block + pass) % 4 == 0; };
    }
    const ToyOutcome expected = train_toy(training);
    for (int stage = 0; stage <= 3; ++stage) {
      for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
        training.plan = zero_plan(stage, {"dp"});
        training.mode = mode;
        const ToyOutcome outcome = train_toy(training);
        EXPECT_EQ(difference(expected, outcome), "") << "stage " << stage << " world " << world << " messages " << messages;
        for (const MemoryReport& report : outcome.memory) {
          const bool in_buckets = report.planned[MemoryState::kReduced] == 0;
          EXPECT_TRUE(!in_buckets || report.measured_peak[MemoryState::kOverflow] > 0) << "stage " << stage << "\n" << to_text(report);
          EXPECT_EQ(report.live[MemoryState::kOverflow], 0U);
        }
      }
    }
  }
}

TEST(ToyEngine, WireBytesAreTheFormula) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& [world, messages] : kTransports) {
      for (const int micro_steps : {1, 2}) {
        for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
          ToyTraining training = small(stage, world);
          training.transport = messages ? test::ThreadTransport::kMessages : test::ThreadTransport::kMemory;
          training.micro_steps = micro_steps;
          training.plan.policy = policy;
          const ToyOutcome outcome = train_toy(training);
          for (std::size_t rank = 0; rank < outcome.memory.size(); ++rank) {
            const WireBytes& planned = outcome.planned_wire[rank];
            EXPECT_EQ(outcome.reduce_bytes[rank], planned.reduce_gradients);
            EXPECT_EQ(outcome.gather_bytes[rank],
                      planned.gather_parameters + planned.gather_gradients + planned.publish_parameters)
                << "stage " << stage << " world " << world << " micro-steps " << micro_steps;
          }
        }
      }
    }
  }
}

TEST(ToyEngine, TrafficSumsToTheTextbookFactors) {
  // 2S (n-1)/n at stages 0 to 2 and 3S (n-1)/n at stage 3 with everything resharded; sums over ranks, S with tail padding.
  for (int stage = 0; stage <= 3; ++stage) {
    ToyTraining training = small(stage, 3);
    training.plan.reshard = Reshard::kAll;
    std::uint64_t padded_bytes = 0;
    training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) {
      if (engine.rank() != 0) return;
      padded_bytes = 0;
      for (const FlatLayout& flat : engine.layout().flats) padded_bytes += flat.bytes();
    };
    const ToyOutcome outcome = train_toy(training);
    std::uint64_t total = 0;
    for (std::size_t rank = 0; rank < 3; ++rank) total += outcome.gather_bytes[rank] + outcome.reduce_bytes[rank];
    EXPECT_EQ(total, padded_bytes * (stage == 3 ? 3 : 2) * 2) << "stage " << stage;
  }
}

TEST(ToyEngine, RingOfThreeHoldsThreeOfTwentyFourLayers) {
  for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
    ToyTraining training = small(3, 2);
    training.model.blocks = 24;
    training.plan.ring_slots = 3;
    training.mode = mode;
    std::uint64_t parameters = 0;
    training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) {
      if (engine.rank() != 0) return;
      parameters = 0;
      for (const FlatLayout& flat : engine.layout().flats) parameters += flat.bytes();
    };
    const ToyOutcome outcome = train_toy(training);
    for (const MemoryReport& report : outcome.memory) {
      EXPECT_LE(report.live_slots_peak, 3);
      EXPECT_GE(report.live_slots_peak, 1);
      EXPECT_LT(report.live_gathered_peak * 5, parameters);
      EXPECT_EQ(report.overflow_slots, 0U);
    }
  }
}

TEST(ToyEngine, NothingGrowsOverTwoHundredSteps) {
  ToyTraining training = small(3, 2);
  training.steps = 200;
  std::array<std::uint64_t, 2> after_first{};
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    const auto rank = static_cast<std::size_t>(engine.rank());
    const std::uint64_t live = engine.memory_report().live.total();
    if (result.step == 1) after_first[rank] = live;
    ASSERT_EQ(live, after_first[rank]) << "step " << result.step;
  };
  (void)train_toy(training);
}

TEST(ToyEngine, APlanThatDoesNotFitIsRefusedWithTheTable) {
  ToyTraining training = small(0, 2);
  training.model.width = 200;
  const std::uint64_t stage0 = train_toy(training).memory[0].planned.total();
  training.memory_limit_bytes = stage0 * 3 / 2;
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[OUT_OF_MEMORY]"), HasSubstr("zero-0"), HasSubstr("zero-3"), HasSubstr("smallest change that fits: zero-")));
  training.memory_limit_bytes = 1000;
  EXPECT_THAT(message_of(training), HasSubstr("no ZeRO stage fits"));
  training.plan = zero_plan(3, {"dp"});
  training.memory_limit_bytes = 0;
  std::uint64_t stage3 = 0;
  for (const MemoryReport& report : train_toy(training).memory) stage3 += report.planned.total();
  training.memory_limit_bytes = 1000;
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("got: " + format_bytes(stage3)), HasSubstr("zero-3 " + format_bytes(stage3))));
}

TEST(ToyEngine, APlanThatDoesNotFitForItsReshardSaysSo) {
  ToyTraining training = small(3, 2);
  training.model = {.width = 200, .blocks = 12};
  const std::uint64_t sharded = train_toy(training).memory[0].planned.total();
  training.plan.reshard = Reshard::kNone;
  const std::uint64_t kept = train_toy(training).memory[0].planned.total();
  training.memory_limit_bytes = sharded + kept;  // two ranks of either, on average
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[OUT_OF_MEMORY]"), HasSubstr("zero-3 with reshard none"), HasSubstr("zero-3 with reshard default")));
}

}  // namespace
}  // namespace zeroth::testing
