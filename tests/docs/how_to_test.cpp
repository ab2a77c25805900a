// The new files of the how-to pages, as they stand there (blocks.py), in one program, and what the pages say of them.
#include "docs/how-to-add-a-backend-1.cpp"
#include "docs/how-to-add-a-group-1.cpp"
#include "docs/how-to-add-a-kernel-1.cpp"
#include "docs/how-to-add-a-plan-1.cpp"
#include "docs/how-to-add-a-reduction-1.cpp"
#include "docs/how-to-add-a-schedule-1.cpp"
#include "docs/how-to-add-a-state-1.cpp"
#include "docs/how-to-add-an-operation-1.cpp"
#include "docs/how-to-add-an-optimizer-1.cpp"
#include "support/grid_threads.h"
#include "support/host_machine.h"
#include "support/thread_ranks.h"
#include "support/toy_training.h"

#include <zeroth/comm/communicator.h>
#include <zeroth/program/passes.h>
#include <zeroth/program/simulate.h>
#include <zeroth/program/verify.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

namespace zeroth {
namespace {

TEST(HowToAddABackend, CallsAreTracedAndMade) {
  const std::shared_ptr<CommBackend> backend = make_traced({});
  std::array<float, 3> data{1, 2, 3};
  ::testing::internal::CaptureStderr();
  Communicator(backend).all_reduce(std::span<float>(data));
  const std::shared_ptr<CommBackend> part = backend->split(0, 0, "part");
  Communicator(part).barrier();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(said.starts_with("0: all_reduce float32 [3]")) << said;
  EXPECT_NE(said.find("\n0: barrier"), std::string::npos) << said;
  EXPECT_EQ(data, (std::array<float, 3>{1, 2, 3}));
  EXPECT_EQ(backend->split(-1, 0, "nobody"), nullptr);
}

TEST(HowToAddAPlan, BitsAreThoseOfStage3AndMemoryIsThePlan) {
  test::ToyTraining training;
  training.world = 2;
  training.plan = zero_plan(3, {"dp"});
  const test::ToyOutcome expected = test::train_toy(training);
  training.plan = wide_bucket_plan({"dp"});
  const test::ToyOutcome outcome = test::train_toy(training);
  EXPECT_EQ(test::difference(expected, outcome), "");
  for (std::size_t rank = 0; rank < outcome.memory.size(); ++rank) {
    const MemoryReport& report = outcome.memory[rank];
    EXPECT_EQ(report.planned, report.measured_peak) << to_text(report);
    EXPECT_GT(report.planned[MemoryState::kBucket], expected.memory[rank].planned[MemoryState::kBucket]);
  }
}

TEST(HowToAddAReduction, TrainsWithTheBytesOfItsFormula) {
  test::ToyTraining training;
  training.world = 2;
  training.optimizer = "OneBitAdam";
  training.plan = zero_plan(2, {"dp"});
  training.tamper = [](int, test::ToyStructure&, EngineSettings& settings) {
    settings.optimizer.freeze_step = 2;
    settings.own_reduction = make_rounded;
  };
  const test::ToyOutcome rounded = test::train_toy(training);
  for (std::size_t rank = 0; rank < rounded.planned_wire.size(); ++rank) {
    const WireBytes& planned = rounded.planned_wire[rank];
    EXPECT_EQ(rounded.gather_bytes[rank], planned.gather_gradients + planned.publish_parameters);
    EXPECT_EQ(rounded.reduce_bytes[rank], 0U);
  }
  training.tamper = [](int, test::ToyStructure&, EngineSettings& settings) {
    settings.optimizer.freeze_step = 2;
    settings.optimizer.compression.compression = "exact";
  };
  const test::ToyOutcome exact = test::train_toy(training);
  const auto last = [](const test::ToyOutcome& outcome) { return std::strtod(outcome.losses.back().c_str(), nullptr); };
  EXPECT_NEAR(last(rounded), last(exact), 0.02 * last(exact));
  EXPECT_FALSE(rounded.same_numbers(exact));
}

TEST(HowToAddASchedule, ProgramsAreVerifiedAndWaitWhatTheFormulaSays) {
  for (const int chunks : {1, 2, 3}) {
    for (const int micro_batches : {1, 4, 7}) {
      const ScheduleOptions options{.ranks = 4, .micro_batches = micro_batches, .chunks_per_rank = chunks};
      const StepProgram program = lower(schedules::breadth_first(options));
      const ScheduleFormula formula = schedules::breadth_first_formula(options, {});
      verify(program, {.in_flight = formula.in_flight});
      const Simulation simulation = simulate(program);
      EXPECT_EQ(formula.bubble.value_or(simulation.bubble), simulation.bubble);
      EXPECT_EQ(simulation.ranks[0].most_pairs, micro_batches * chunks);
    }
  }
}

TEST(HowToAddAnOperation, ItIsJoinedByARankWithoutABatch) {
  test::run_ranks(2, [](int rank, const std::shared_ptr<CommBackend>& backend) {
    const auto device = make_cpu_device();
    test::ToyModel model({}, 7);
    EngineSettings settings;
    settings.plan = zero_plan(3, {"dp"});
    settings.groups = {GroupHyper{}, GroupHyper{}};
    settings.uneven = Uneven::kJoin;
    Engine engine(model.structure().params, model.structure().units, settings, *device, backend, model, Logger());
    model.attach(engine);
    TokenCount tokens(engine);
    engine.begin_epoch();
    for (int batch = 0; engine.next_batch(batch < 1 + rank); ++batch) {
      (void)model.forward_backward(batch, 0);
      (void)engine.step();
      test::require(tokens.count(10 + rank) == (batch == 0 ? 21 : 11), "tokens of batch " + std::to_string(batch));
    }
    engine.barrier();
  });
}

/// Algorithm 2 of the paper in double.
void signum_oracle(double& param, double& momentum, double grad, const GroupHyper& hyper) {
  momentum = hyper.beta1 * momentum + (1 - hyper.beta1) * grad;
  const double sign = momentum > 0 ? 1 : momentum < 0 ? -1 : 0;
  param -= hyper.lr * (sign + hyper.weight_decay * param);
}

template <class T>
void expect_signum(double tolerance) {
  const std::unique_ptr<Optimizer> optimizer = make_signum({});
  test::HostMachine machine;
  ASSERT_EQ(optimizer->states().size(), 1U);
  const GroupHyper hyper{.lr = 0.03, .beta1 = 0.9, .weight_decay = 0.1};
  std::array<T, 5> param{T{1}, T{-2}, T{0}, T{0.5}, T{3}};
  std::array<T, 5> momentum{};
  std::array<double, 5> wanted{1, -2, 0, 0.5, 3};
  std::array<double, 5> wanted_momentum{};
  for (const std::array<T, 5>& grad :
       {std::array<T, 5>{4, -4, 0, 8, -1}, {-2, 6, 0, -1, 1}, {1, 1, 1, 1, 1}}) {  // sums of two ranks
    std::array<std::byte*, 1> states{reinterpret_cast<std::byte*>(momentum.data())};
    optimizer->step({.param = reinterpret_cast<std::byte*>(param.data()),
                     .states = states,
                     .grad = reinterpret_cast<const std::byte*>(grad.data()),
                     .n = static_cast<std::int64_t>(grad.size()),
                     .dtype = DTypeOf<T>::value,
                     .factor = 0.5,
                     .hyper = hyper},
                    *machine.kernels, machine.stream);
    for (std::size_t i = 0; i < grad.size(); ++i) {
      signum_oracle(wanted[i], wanted_momentum[i], 0.5 * static_cast<double>(grad[i]), hyper);
      EXPECT_NEAR(static_cast<double>(param[i]), wanted[i], tolerance) << i;
      EXPECT_NEAR(static_cast<double>(momentum[i]), wanted_momentum[i], tolerance) << i;
    }
  }
}

TEST(HowToAddAGroup, UnitsOfItAreOfTheirRanks) {
  // A model without tokens that travel: the ranks of one expert train theirs, apart from those of the other.
  test::ToyTraining training;
  training.world = 4;
  test::run_ranks(4, [&](int /*rank*/, const std::shared_ptr<CommBackend>& backend) {
    test::ToyModel model(training.model, 7);
    std::vector<ParamSpec> params = model.structure().params;
    for (const UnitSpec& unit : model.structure().units) {
      for (const int param : unit.params) {
        std::string& name = params[static_cast<std::size_t>(param)].name;
        if (unit.repeated) name = "experts." + name;
      }
    }
    EngineSettings settings;
    settings.groups.resize(2);
    put_experts_apart(4, 2, params, settings);
    const auto device = make_cpu_device();
    Engine engine(params, model.structure().units, settings, *device, backend, model, Logger());
    model.attach(engine);
    for (int step = 0; step < 2; ++step) {
      (void)model.forward_backward(step, 0);
      test::require(engine.step().committed, "a step with experts is not committed");
    }
    test::require(engine.layout().flat(engine.layout().unit_flats[1].front()).world() == 2, "an expert's ranks");
    test::require(engine.layout().flat(engine.layout().unit_flats[0].front()).world() == 4, "the root's ranks");
    engine.barrier();
  });
}

TEST(HowToAddAState, TheAverageAndTheRowsAreKept) {
  const std::unique_ptr<Optimizer> optimizer = make_averaged_sgd();
  test::HostMachine machine;
  std::array<double, 2> param{1, 2};
  std::array<double, 2> average{};
  std::int32_t updates = 0;
  const std::array<double, 2> grad{2, 4};
  std::array<std::byte*, 2> states{reinterpret_cast<std::byte*>(average.data()),
                                   reinterpret_cast<std::byte*>(&updates)};
  for (std::int64_t step = 1; step <= 2; ++step) {
    optimizer->step({.param = reinterpret_cast<std::byte*>(param.data()),
                     .states = states,
                     .grad = reinterpret_cast<const std::byte*>(grad.data()),
                     .n = 2,
                     .dtype = DType::kFloat64,
                     .factor = 0.5,
                     .step = step,
                     .hyper = {.lr = 0.25}},
                    *machine.kernels, machine.stream);
  }
  EXPECT_EQ(param, (std::array<double, 2>{0.5, 1.0}));
  EXPECT_EQ(average, (std::array<double, 2>{0.625, 1.25}));
  EXPECT_EQ(updates, 2);
}

template <int kLanes>
void expect_scaled(std::int64_t n) {
  alignas(64) std::array<float, 64> data{};
  std::array<float, 64> wanted{};
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = wanted[i] = 0.1F * static_cast<float>(i + 1);
  for (std::int64_t i = 0; i < n; ++i) wanted[static_cast<std::size_t>(i)] *= 0.3F;
  kernels::test::ScrambledThreads threads(5, 1);
  threads.each(kernels::ScaleGrid<kLanes>{data.data(), 0.3F, n});
  EXPECT_EQ(data, wanted);
}

TEST(HowToAddAKernel, AGridScalesEveryElementOnce) {
  expect_scaled<1>(13);
  expect_scaled<kernels::kPack>(37);
}

TEST(HowToAddAnOptimizer, LionIsAlgorithm2) {
  expect_signum<double>(1e-14);  // values up to 4 and three steps of a few roundings
  expect_signum<float>(5e-6);
}

}  // namespace
}  // namespace zeroth
