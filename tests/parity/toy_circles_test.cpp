// Models that make calls of their own between the units of a toy model: at any place, of any group, in another place on
// each rank. Nobody waits for ever, and the numbers are those of stage 0 without such calls.
#include "parity/toy_engine.h"
#include "support/model_calls.h"

#include <zeroth/comm/communicator.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

/// Five blocks, two bucket slots: a rank needs the slot of a block when it has given the gradients of the next two.
ToyTraining four_ranks(int zero_stage) {
  ToyTraining training = small(zero_stage, 4);
  training.steps = 2;
  training.timeout = Milliseconds{20'000};
  return training;
}

std::string difference_from_stage_zero(const ToyTraining& training) {
  ToyTraining plain = training;
  plain.plan = zero_plan(0, {"dp"});
  plain.visitor = {};
  plain.reports_memory = false;
  return difference(train_toy(plain), train_toy(training));
}

/// Until so many of one process have come; for tests that want one order of events.
class Gate {
 public:
  void come() { ++come_; }
  void await(int ranks) const {
    const Deadline deadline(Milliseconds{10'000});
    while (come_.load() < ranks && !deadline.passed()) std::this_thread::sleep_for(std::chrono::microseconds{100});
  }

 private:
  std::atomic<int> come_{0};
};

/// A sum over `ranks`, of which this rank is one.
class Pair {
 public:
  Pair(CommBackend& world, int color) : part_(world.split(color, world.rank(), "pair")) {}
  void sum() const {
    std::vector<float> data{1.0F, 2.0F, static_cast<float>(part_->rank())};
    Communicator(part_).all_reduce(std::span(data));
    ZR_CHECK(data[0] == 2.0F && data[2] == 1.0F, ErrorCode::kInternal, "a sum of the model is wrong", {});
  }

 private:
  std::shared_ptr<CommBackend> part_;
};

/// Without slots that units share (stage 1) nobody waits for one.
class Circles : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, Circles, ::testing::Values(2, 3));

/// A waits for the slot that B and D must free, B is in a call with C, C waits for its slot as A does, D is in a call
/// with A.
TEST_P(Circles, OfSlotsAndCallsOfFourRanksEnd) {
  ToyTraining training = four_ranks(GetParam());
  training.timeout = Milliseconds{5'000};
  const auto gate = std::make_shared<Gate>();
  training.visitor = [gate](CommBackend& world) -> ToyModel::Visitor {
    const int rank = world.rank();
    const bool early = rank == 1 || rank == 3;  // B and D
    const auto pair = std::make_shared<Pair>(world, rank == 1 || rank == 2 ? 1 : 0);
    return [=, first = true](bool backward, int unit) mutable {
      if (!backward || !first) return;
      // B and D make their call when they have published blocks 4 and 3; A and C, which publish block 4 only when B and
      // D are in there, after block 2, for which they need the slot of block 4.
      if (!early && unit == 5) {
        gate->await(2);
        std::this_thread::sleep_for(Milliseconds{20});
      }
      if (early && unit == 3) {
        gate->come();
        pair->sum();
        first = false;
      }
      if (!early && unit == 2) {
        pair->sum();
        first = false;
      }
    };
  };
  EXPECT_EQ(difference_from_stage_zero(training), "");
}

/// A waits for a slot which nobody can free before C has said whether it takes part, and C is in a call with A.
TEST_P(Circles, OfACallBeforeAPublicationEndWithASpill) {
  ToyTraining training = four_ranks(GetParam());
  training.timeout = Milliseconds{5'000};
  training.visitor = [](CommBackend& world) -> ToyModel::Visitor {
    const int rank = world.rank();
    const auto pair = std::make_shared<Pair>(world, rank % 2);
    return [=, first = true](bool backward, int unit) mutable {
      if (!backward || !first || unit != (rank < 2 ? 2 : 5)) return;
      pair->sum();
      first = false;
    };
  };
  ToyTraining plain = training;
  plain.visitor = {};
  plain.plan = zero_plan(0, {"dp"});
  const ToyOutcome outcome = train_toy(training);
  EXPECT_EQ(difference(train_toy(plain), outcome), "");
  EXPECT_GT(outcome.memory[0].spills + outcome.memory[1].spills, 0U);
}

/// The call comes at the same place on all ranks, one of which is slow: nobody is in anybody's way.
TEST(CirclesOfNobody, CallsInOneOrderNeedNoSpill) {
  ToyTraining training = four_ranks(2);
  training.visitor = [](CommBackend& world) -> ToyModel::Visitor {
    const int rank = world.rank();
    const auto pair = std::make_shared<Pair>(world, rank / 2);
    return [=](bool backward, int unit) {
      if (backward && rank == 3) std::this_thread::sleep_for(Milliseconds{5});
      if (backward && unit > 0) pair->sum();
    };
  };
  const ToyOutcome outcome = train_toy(training);
  for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.spills, 0U);
}

/// Programs drawn from a seed.
void expect_programs_end(std::uint64_t begin, std::uint64_t end) {
  for (std::uint64_t seed = begin; seed < end && !::testing::Test::HasFailure(); seed += kProgramsOfAModel) {
    ToyTraining training = training_of_programs(seed);
    const ToyOutcome expected = train_toy(training);
    for (std::uint64_t program = seed; program < std::min(end, seed + kProgramsOfAModel); ++program) {
      add_calls(training, program);
      try {
        ASSERT_EQ(difference(expected, train_toy(training)), "") << "program " << program << ": " << text_of(training);
      } catch (const std::exception& error) {
        FAIL() << "program " << program << ": " << text_of(training) << ": " << error.what();
      }
    }
  }
}

TEST(RandomCalls, EndWithTheSameBits) {
  expect_programs_end(0, 400);
}

TEST(LongRandomCalls, EndWithTheSameBits) {
  expect_programs_end(1'000, 11'000);
}

}  // namespace
}  // namespace zeroth::test
