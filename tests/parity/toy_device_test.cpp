// The engine with all its states in memory of a GPU, on a fake: the bits of the CPU at every stage, in any order that
// streams and events allow.
#include "comm/decorators/staging_backend.h"
#include "comm/nccl/nccl_backend.h"
#include "device/cuda/cuda_device.h"
#include "support/checkpoint_folder.h"
#include "support/covering_array.h"
#include "support/error_of.h"
#include "support/grid_kernels.h"
#include "toy_beside.h"
#include "toy_engine.h"

#include <zeroth/zero/bus_traffic.h>
#include <zeroth/zero/message_reduction.h>
#include <zeroth/zero/tier_plan.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A training whose ranks have a device each, of the fake.
class OnFakeGpu {
 public:
  /// `over_nccl`: a GPU for each rank; else ranks share one, and calls go through pinned memory.
  OnFakeGpu(int world, bool over_nccl)
      : gpu_(over_nccl ? world : 1),
        kernels_(gpu_),
        cuda_(gpu_.cuda_table()),
        nccl_(gpu_.nccl_table()),
        over_nccl_(over_nccl) {}

  ToyTraining prepared(ToyTraining training) {
    training.make_device = [this](int rank) {
      return detail::make_cuda_device(cuda_, over_nccl_ ? rank : 0, Milliseconds{20'000});
    };
    training.decorate = [this](std::unique_ptr<CommBackend> base, int rank) -> std::unique_ptr<CommBackend> {
      CommOptions options;
      options.timeout = Milliseconds{20'000};
      options.device = over_nccl_ ? rank : 0;
      if (!over_nccl_) {
        return detail::make_staging_backend(std::move(base), options,
                                            [this]() -> const detail::CudaTable& { return cuda_; });
      }
      options.reduction = Reduction::kTransport;
      return detail::make_nccl_backend(std::move(base), options,
                                       [this] { return detail::NcclLibraries{.nccl = &nccl_, .cuda = &cuda_}; });
    };
    const auto before = training.tamper;
    training.tamper = [this, before](int rank, ToyStructure& structure, EngineSettings& settings) {
      if (before) before(rank, structure, settings);
      settings.own_kernels = [this](Device& device, ThreadPool&) {
        return detail::make_cuda_kernels(cuda_, kernels_.table(), device);
      };
    };
    return training;
  }
  ToyOutcome train(const ToyTraining& training) { return train_toy(prepared(training)); }

  /// Nothing that no program may do, and nothing left.
  /// Streams run no further than somebody waits for.
  void run_late() { gpu_.late = true; }
  /// Nor for somebody who looks as few times.
  void run_later(int looks) {
    run_late();
    gpu_.looks = looks;
  }
  void forget_copies() { gpu_.clear_log(); }
  /// The streams of copies on the first device, in the order of their submission.
  std::vector<int> copies() {
    std::vector<int> streams;
    for (const std::string& line : gpu_.log(0, {"copy"}))
      streams.push_back(std::stoi(line.substr(line.rfind('s') + 1)));
    return streams;
  }
  void limit_memory(std::size_t bytes) { gpu_.device_bytes = bytes; }
  void refuse_to_pin_above(std::size_t bytes) { gpu_.most_pinned = bytes; }
  void expect_clean() {
    for (const Deadline deadline(Milliseconds{20'000}); gpu_.living_comms() > 0 && !deadline.passed();)
      std::this_thread::sleep_for(Milliseconds{1});
    EXPECT_THAT(gpu_.violations(), IsEmpty());
    EXPECT_EQ(gpu_.living_streams(), 0U);
    EXPECT_EQ(gpu_.living_events(), 0U);
    EXPECT_GT(kernels_.runs(), 0);
  }

 private:
  FakeGpu gpu_;
  GridKernels kernels_;
  detail::CudaTable cuda_;
  detail::NcclTable nccl_;
  bool over_nccl_;
};

TEST(ToyOnDevice, HasTheBitsOfTheCpuAtEveryStage) {
  for (const int world : {1, 2, 3}) {
    const ToyOutcome expected = train_toy(tiny(0, world));
    for (const int stage : {0, 1, 2, 3}) {
      OnFakeGpu fake(world, /*over_nccl=*/false);
      const ToyOutcome outcome = fake.train(tiny(stage, world));
      EXPECT_EQ(difference(expected, outcome), "") << "stage " << stage << ", " << world << " ranks";
      for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.planned, memory.measured_peak);
      fake.expect_clean();
    }
  }
}

ToyTraining with_messages(ToyTraining training) {
  training.optimizer = "OneBitAdam";
  training.steps = 5;
  training.tamper = [before = training.tamper](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    settings.optimizer.freeze_step = 2;
    settings.compare_replicas = true;
  };
  return training;
}

TEST(ToyOnDevice, MessagesHaveTheBitsOfTheCpu) {
  const ToyOutcome expected = train_toy(with_messages(tiny(0, 2)));
  EXPECT_TRUE(expected.results.back().messages);
  for (const int stage : {0, 2, 3}) {
    for (const int where : {static_cast<int>(kNothing), static_cast<int>(kHostParameters)}) {
      OnFakeGpu fake(2, /*over_nccl=*/false);
      const ToyTraining training = with_messages(beside(tiny(stage, 2), where));
      EXPECT_EQ(difference(expected, fake.train(training)), "") << "stage " << stage << " " << where;
      EXPECT_EQ(difference(expected, fake.train(with_gradients_beside(training))), "") << "stage " << stage;
      fake.expect_clean();
    }
  }
}

/// Messages in the form of `compression`. Matrices are large enough for products of thin ones.
ToyTraining with_form(ToyTraining training, const std::string& compression, DType dtype = DType::kFloat32) {
  training = with_messages(std::move(training));
  training.model.width = 40;
  training.model.dtype = dtype;
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.tamper = [before = training.tamper, compression](int rank, ToyStructure& structure,
                                                            EngineSettings& settings) {
    before(rank, structure, settings);
    settings.optimizer.compression = {.compression = compression, .ratio = 0.1, .rank = 2};
  };
  return training;
}

TEST(ToyOnDevice, TheGreatestElementsAndThinProductsHaveTheBitsOfTheCpuAtEveryStage) {
  for (const char* const form : {"top_k", "low_rank"}) {
    for (const int world : {2, 3}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        if (world == 3 && dtype == DType::kBFloat16) continue;
        const ToyOutcome expected = train_toy(with_form(tiny(0, world), form, dtype));
        EXPECT_TRUE(expected.results.back().messages);
        for (const int stage : {0, 1, 2, 3}) {
          // Two ranks: in whatever order NCCL adds, there is one sum.
          OnFakeGpu fake(world, /*over_nccl=*/world == 2 && stage % 2 == 1);
          if (stage == 2) fake.run_late();
          EXPECT_EQ(difference(expected, fake.train(with_form(tiny(stage, world), form, dtype))), "")
              << form << ", stage " << stage << ", " << world << " ranks, " << name_of(dtype);
          fake.expect_clean();
        }
      }
    }
  }
}

TEST(ToyOnDevice, EveryFormOfMessagesHasTheBitsOfTheCpu) {
  std::vector<std::string> forms = reduction_names();
  std::erase(forms, "one_bit");  // above
  forms.emplace_back("adaptive");
  for (const std::string& form : forms) {
    for (const int where : {static_cast<int>(kNothing), static_cast<int>(kHostParameters)}) {
      const ToyTraining training = with_form(beside(tiny(2, 2), where), form);
      OnFakeGpu fake(2, /*over_nccl=*/false);
      fake.run_late();
      EXPECT_EQ(difference(train_toy(with_form(tiny(0, 2), form)), fake.train(training)), "") << form << " " << where;
      fake.expect_clean();
    }
  }
}

/// Sends nothing, and has a loop of its own.
class LoopOfTheHost final : public SegmentReduction {
 public:
  using SegmentReduction::SegmentReduction;

 private:
  void reduce_part(const Part& part) override { std::fill_n(part.result, part.segment.numel, 0.0F); }
  MessageWire wire_of(const Segment&) const override { return {}; }
};

TEST(ToyOnDevice, AReductionWithLoopsOfTheHostIsRefusedByName) {
  ToyTraining training = with_form(tiny(1, 2), "of_the_host");
  training.tamper = [before = training.tamper](int rank, ToyStructure& structure, EngineSettings& settings) {
    before(rank, structure, settings);
    settings.own_reduction = [](const ReductionContext& context) { return std::make_unique<LoopOfTheHost>(context); };
  };
  OnFakeGpu fake(2, /*over_nccl=*/false);
  EXPECT_THAT(message_of(fake.prepared(training)), AllOf(HasSubstr("has no kernel for"), HasSubstr("of_the_host")));
}

TEST(KernelsOfADevice, RefuseASumOfPlacesThatItHasNotAndAddNothing) {
  FakeGpu gpu(1);
  const GridKernels grids(gpu);
  const detail::CudaTable cuda = gpu.cuda_table();
  const std::unique_ptr<Device> device = detail::make_cuda_device(cuda, 0, Milliseconds{20'000});
  const std::unique_ptr<Kernels> machine = detail::make_cuda_kernels(cuda, grids.table(), *device);
  const Stream stream = device->make_stream("messages");
  const Scratch sum = machine->make_scratch(4 * sizeof(float));
  const Scratch places = machine->make_scratch(2 * sizeof(std::int32_t));
  const Scratch values = machine->make_scratch(2 * sizeof(float));
  const kernels::TopkSource source{.places = reinterpret_cast<const std::int32_t*>(places.bytes.data()),
                                   .values = reinterpret_cast<const float*>(values.bytes.data()),
                                   .k = 2};
  const kernels::TopkAddArgs args{
      .dst = reinterpret_cast<float*>(sum.bytes.data()), .sources = &source, .num_sources = 1, .n = 4};
  const auto give = [&](std::int32_t last) {
    const std::vector<std::int32_t> at{1, last};
    const std::vector<float> ones{1.0F, 1.0F};
    machine->zero(sum.bytes.data(), sum.bytes.size(), stream);
    machine->copy(places.bytes.data(), at.data(), places.bytes.size(), stream);
    machine->copy(values.bytes.data(), ones.data(), values.bytes.size(), stream);
  };
  const auto got = [&] {
    std::vector<float> elements(4);
    machine->copy(elements.data(), sum.bytes.data(), sum.bytes.size(), stream);
    return elements;
  };
  for (const std::int32_t last : {-1, 4}) {
    give(last);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { machine->topk_add(args, stream); }),
                AllOf(HasSubstr("a sum has no such place"), HasSubstr("0 to 3")));
    EXPECT_EQ(got(), std::vector<float>(4));
  }
  give(3);
  machine->topk_add(args, stream);
  EXPECT_EQ(got(), (std::vector<float>{0.0F, 1.0F, 0.0F, 1.0F}));
  EXPECT_THAT(gpu.violations(), IsEmpty());
}

TEST(ToyOnDevice, CodesHaveTheBitsOfTheCpu) {
  for (const auto& [stage, parameter_bits] : {std::pair{0, 0}, {2, 0}, {3, 0}, {3, 8}}) {
    ToyTraining training = tiny(stage, 2);
    training.model.width = 40;
    training.plan.codes = {.parameter_bits = parameter_bits, .gradient_bits = 4};
    const ToyOutcome expected = train_toy(training);
    OnFakeGpu fake(2, /*over_nccl=*/false);
    EXPECT_EQ(difference(expected, fake.train(training)), "") << "stage " << stage << " bits " << parameter_bits;
    fake.expect_clean();
  }
}

TEST(ToyOnDevice, MessagesOfStatesThatRestBesideItAreRefused) {
  for (const int where : {static_cast<int>(kHostStates), static_cast<int>(kFiledBoth)}) {
    OnFakeGpu fake(2, /*over_nccl=*/false);
    const ToyTraining training = fake.prepared(with_messages(beside(tiny(2, 2), where)));
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("[CONFIG]"),
                                            HasSubstr("/zero_optimization/offload_optimizer with optimizer OneBitAdam"),
                                            HasSubstr("offload_param")));
  }
}

TEST(ToyOnDevice, HasTheBitsOfTheCpuOverNcclAtEveryStage) {
  // Two ranks: in whatever order NCCL adds, there is one sum.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    ToyTraining plain = tiny(0, 2);
    plain.model.dtype = dtype;
    plain.model.round_gradients = dtype == DType::kBFloat16;
    const ToyOutcome expected = train_toy(plain);
    for (const int stage : {0, 1, 2, 3}) {
      ToyTraining training = plain;
      training.plan = zero_plan(stage, {"dp"});
      OnFakeGpu fake(2, /*over_nccl=*/true);
      const ToyOutcome outcome = fake.train(training);
      EXPECT_EQ(difference(expected, outcome), "") << "stage " << stage << " " << name_of(dtype);
      // Of bfloat16 as well: NCCL does not widen, so buckets are those of the sums.
      for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.planned, memory.measured_peak);
      fake.expect_clean();
    }
  }
}

/// What read_states() gives of every kind, before and after an average was applied and a weight written.
ToyTraining with_states(int zero_stage, DType dtype, std::vector<std::vector<std::byte>>& states) {
  ToyTraining training = tiny(zero_stage, 2);
  training.model.dtype = dtype;
  training.reports_memory = false;
  training.at_start = [](Engine& engine, ToyModel&) { engine.add_average("average"); };
  training.after_step = [&states](Engine& engine, ToyModel& model, const StepResult& result) {
    engine.update_average("average", 0.5);
    if (result.step != 2) return;
    const auto read_all = [&engine, &states](const std::vector<std::string>& kinds) {
      for (const std::string& kind : kinds) {
        engine.read_states({.kind = kind, .ranks = {0}},
                           [&states](StateTensor tensor) { states.push_back(std::move(tensor.data)); });
      }
    };
    engine.swap_average("average");
    read_all({"param", "master", "average"});
    engine.swap_average("average");
    const std::vector<std::byte> zeros(array_bytes(40 * 40, engine.layout().params[3].dtype));
    engine.write_weights({.names = {"blocks.0.weight"}, .source = -1, .masters = false, .values = [&](std::size_t) {
                            return std::span<const std::byte>(zeros);
                          }});
    read_all({"param", "master", "average", "exp_avg"});
    (void)model.forward_backward(9, 0);
    read_all({"grad"});
    engine.discard_gradients();
  };
  return training;
}

TEST(ToyOnDevice, StatesAreReadWrittenAndAveragedAsOnTheCpu) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::vector<std::byte>> expected;
    const ToyOutcome outcome = train_toy(with_states(0, dtype, expected));
    EXPECT_GT(expected.size(), 40U);
    for (const int stage : {0, 3}) {
      OnFakeGpu fake(2, /*over_nccl=*/false);
      std::vector<std::vector<std::byte>> states;
      EXPECT_EQ(difference(outcome, fake.train(with_states(stage, dtype, states))), "") << stage;
      EXPECT_EQ(states == expected, true) << stage << " " << name_of(dtype);
      fake.expect_clean();
    }
  }
}

TEST(ToyOnDevice, EverythingThatATrainingMayAskForHasTheBitsOfTheCpu) {
  constexpr int kCases = 12;
  for (int row = 0; row < kCases; ++row) {
    ToyTraining training = tiny(row % 4, 2 + row % 2);
    training.model.dtype = row % 3 == 0 ? DType::kBFloat16 : row % 3 == 1 ? DType::kFloat32 : DType::kFloat64;
    training.model.round_gradients = row % 2 == 0;
    training.model.reuse_last = row % 4 < 2;
    training.model.tie_first_two = row % 5 == 0;
    training.micro_steps = 1 + row % 3;
    training.passes = 1 + (row / 3) % 2;
    training.plan.policy = row % 4 == 1 ? ReductionPolicy::kPerStep : ReductionPolicy::kPerMicroStep;
    training.optimizer = row % 3 == 0 ? "AdamW" : row % 3 == 1 ? "SGD" : "Adam";
    if (row % 2 == 1) {
      training.tamper = [](int, ToyStructure& structure, EngineSettings&) {
        for (ParamSpec& param : structure.params) param.grad_factor = 0.75;
      };
    }
    OnFakeGpu fake(training.world, /*over_nccl=*/false);
    EXPECT_EQ(difference(train_toy(training), fake.train(training)), "") << "row " << row;
    fake.expect_clean();
  }
}

TEST(ToyOnDevice, ANonFiniteGradientIsFoundByItsKernelAndNamed) {
  for (const int stage : {0, 3}) {
    ToyTraining training = tiny(stage, 2);
    training.poison = [](int rank, std::int64_t step, int, int param) { return rank == 1 && step == 1 && param >= 3; };
    const ToyOutcome expected = train_toy(training);
    OnFakeGpu fake(2, /*over_nccl=*/false);
    const ToyOutcome outcome = fake.train(training);
    ASSERT_TRUE(outcome.results[1].first_offender.has_value());
    EXPECT_EQ(outcome.results[1].reason, expected.results[1].reason);
    EXPECT_EQ(difference(expected, outcome), "");
    fake.expect_clean();
  }
}

void expect_same_bits(const FactorRow& row) {
  std::string text = "factors";
  for (const int level : row) text += " " + std::to_string(level);
  const ToyTraining plain = training_of(row);
  // Two ranks: in whatever order NCCL adds, there is one sum.
  OnFakeGpu fake(plain.world, /*over_nccl=*/plain.world == 2 && plain.model.dtype != DType::kFloat16);
  if (row[9] == 1) fake.run_late();
  const ToyTraining offloaded = beside(plain, row[3]);
  const ToyOutcome outcome = fake.train(row[8] == 1 ? with_gradients_beside(offloaded) : offloaded);
  EXPECT_EQ(difference(train_toy(plain), outcome), "") << text;
  for (const MemoryReport& memory : outcome.memory) {
    EXPECT_EQ(memory.planned, memory.measured_peak) << text << "\n" << to_text(memory);
    EXPECT_EQ(memory.planned_files, memory.measured_files) << text;
    EXPECT_EQ(memory.planned_files > 0, has_files(row[3])) << text;
  }
  fake.expect_clean();
}

TEST(ToyOnDevice, WhatRestsBesideItIsUpdatedWithTheSameBits) {
  for (const FactorRow& row : covering_array(kBesideLevels, 2, is_possible)) expect_same_bits(row);
}

TEST(LongToyOnDevice, WhatRestsBesideItIsUpdatedWithTheSameBits) {
  for (const FactorRow& row : covering_array(kBesideLevels, 3, is_possible)) expect_same_bits(row);
}

TEST(LongToyOnDevice, GradientsBesideItHaveTheSameBitsInEveryCombination) {
  int other = 0;  // of factors that go round
  for (const int stage : {0, 1, 2, 3}) {
    for (const int world : {1, 2, 3}) {
      for (int where = 0; where < kNumBeside; ++where) {
        for (const int dtype : {0, 1, 2, 3}) {
          for (const int micro_steps : {0, 1}) {
            FactorRow row{stage,     world - 1, dtype, where,     other % 3, micro_steps,
                          other % 3, other % 2, 1,     other % 2, 0};
            if (!is_possible(row)) row[6] = 0;
            expect_same_bits(row);
            ++other;
          }
        }
      }
    }
  }
}

/// What crosses the bus of each rank in the second step of a training, as the formula says and as it is counted.
struct CountedTraffic {
  std::vector<BusTraffic> planned;
  std::vector<BusTraffic> counted;
};

CountedTraffic traffic_of(ToyTraining training) {
  training.steps = 2;
  const auto world = static_cast<std::size_t>(training.world);
  CountedTraffic traffic{.planned = std::vector<BusTraffic>(world), .counted = std::vector<BusTraffic>(world)};
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) {
    const auto rank = static_cast<std::size_t>(engine.rank());
    const MemoryReport report = engine.memory_report();
    BusTraffic& counted = traffic.counted[rank];
    counted = {.down = report.bus_down - counted.down, .up = report.bus_up - counted.up};
    traffic.planned[rank] =
        plan_bus_traffic(engine.layout(), engine.settings().plan, engine.rank(), engine.settings().micro_steps);
  };
  OnFakeGpu fake(training.world, /*over_nccl=*/false);
  (void)fake.train(training);
  return traffic;
}

TEST(ToyOnDevice, GradientsAndParametersCrossTheBusAsTheFormulaSays) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool rounds : {false, true}) {
      ToyTraining training = tiny(2, 2);
      training.model.dtype = dtype;
      training.model.round_gradients = size_of(dtype) == 2;
      std::uint64_t elements = 0;  // of rank 0
      training.at_start = [&elements](Engine& engine, ToyModel&) {
        if (engine.rank() != 0) return;
        for (const FlatLayout& flat : engine.layout().flats)
          elements += static_cast<std::uint64_t>(flat.shard(0).size());
      };
      const auto [planned, counted] = traffic_of(with_update(beside(training, kHostStates), {.rounds_sums = rounds}));
      EXPECT_EQ(counted, planned) << name_of(dtype) << rounds;
      const std::uint64_t p = size_of(dtype);
      const std::uint64_t sums = rounds && dtype == DType::kBFloat16 ? 2 : 4;
      const std::uint64_t param = dtype == DType::kFloat16 ? 0 : p;  // a float16 parameter follows from its master
      EXPECT_EQ(counted[0], (BusTraffic{.down = elements * (sums + param), .up = elements * p})) << name_of(dtype);
    }
  }
}

/// stage, ranks, dtype, what rests beside the device, micro-steps, gradients beside it, policy
TEST(ToyOnDevice, WhatCrossesTheBusIsTheFormulaOfEveryResidency) {
  for (const FactorRow& row : covering_array({4, 2, 3, kNumBeside, 2, 2, 2}, 2, {})) {
    std::string text = "factors";
    for (const int level : row) text += " " + std::to_string(level);
    ToyTraining training = tiny(row[0], row[1] + 1);
    training.model = {.width = 50, .blocks = 3, .dtype = kDtypes[row[2]]};
    training.model.round_gradients = size_of(training.model.dtype) == 2;
    training.micro_steps = row[4] == 0 ? 1 : 3;
    if (row[6] == 1) training.plan.policy = ReductionPolicy::kPerStep;
    training = beside(training, row[3]);
    if (row[5] == 1) training = with_gradients_beside(training);
    const auto [planned, counted] = traffic_of(training);
    for (std::size_t rank = 0; rank < planned.size(); ++rank) {
      EXPECT_EQ(counted[rank].down, planned[rank].down) << text;
      EXPECT_EQ(counted[rank].up, planned[rank].up) << text;
    }
  }
}

TEST(ToyOnDevice, PiecesCrossTheBusAheadOfTheUpdateAndBehindIt) {
  ToyTraining training = tiny(0, 1);
  training.model = {.width = 100, .blocks = 2};  // flats of ten blocks
  training.steps = 2;
  training.reports_memory = false;
  OnFakeGpu fake(1, /*over_nccl=*/false);
  training.after_step = [&fake](Engine&, ToyModel&, const StepResult& result) {
    if (result.step == 1) fake.forget_copies();
  };
  (void)fake.train(beside(training, kHostStates));
  std::vector<int> streams = fake.copies();
  ASSERT_GT(streams.size(), 20U);
  // Three slots, each with sums and parameters, across flats. Then one goes back, and the next comes.
  const int down = streams.front();
  const int up = streams[6];
  std::erase_if(streams, [=](int stream) { return stream != down && stream != up; });  // reads at the end
  const std::size_t pieces = streams.size() / 3;
  std::vector<int> expected(6, down);
  for (std::size_t piece = 3; piece < pieces; ++piece) expected.insert(expected.end(), {up, down, down});
  expected.insert(expected.end(), 3, up);
  EXPECT_NE(down, up);
  EXPECT_EQ(streams, expected);
}

TEST(ToyOnDevice, TrainsWithStatesBesideADeviceThatTheyDoNotFitIn) {
  ToyTraining training = tiny(1, 1);
  training.model = {.width = 100, .blocks = 4};
  const ToyOutcome expected = train_toy(training);
  const MemorySnapshot& whole = expected.memory[0].planned;
  OnFakeGpu fake(1, /*over_nccl=*/false);
  fake.limit_memory(whole.total() - whole[MemoryState::kOptimizer] / 2);
  EXPECT_THAT(message_of(fake.prepared(training)), HasSubstr("[OUT_OF_MEMORY]"));
  const ToyOutcome outcome = fake.train(beside(training, kHostStates));
  EXPECT_EQ(difference(expected, outcome), "");
  EXPECT_EQ(outcome.memory[0].planned[MemoryState::kOptimizer], whole[MemoryState::kOptimizer]);
  fake.expect_clean();
}

/// `tables`: one a rank, of the plan.
ToyTraining with_tiers(ToyTraining training, std::vector<TierTable>& tables) {
  tables.resize(static_cast<std::size_t>(training.world));
  training.at_start = [&tables](Engine& engine, ToyModel&) {
    tables[static_cast<std::size_t>(engine.rank())] =
        plan_tiers(engine.layout(), engine.settings().plan, engine.rank(), element_states(2),
                   engine.settings().micro_steps, engine.settings().storage.stripe_bytes);
  };
  return training;
}

TEST(ToyOnDevice, SumsOfMicroStepsRestInHostMemoryAndTheDeviceNeedsOnlyBuckets) {
  constexpr auto kReduced = static_cast<std::size_t>(MemoryState::kReduced);
  for (const int stage : {1, 2, 3}) {
    ToyTraining training = tiny(stage, 2);
    training.micro_steps = 3;
    const ToyOutcome expected = train_toy(training);
    std::vector<TierTable> on_device;
    OnFakeGpu resident(2, /*over_nccl=*/false);
    (void)resident.train(with_tiers(beside(training, kHostStates), on_device));
    std::vector<TierTable> in_host;
    OnFakeGpu fake(2, /*over_nccl=*/false);
    const ToyOutcome outcome = fake.train(with_tiers(with_gradients_beside(beside(training, kHostStates)), in_host));
    EXPECT_EQ(difference(expected, outcome), "") << stage;
    std::size_t limit = 0;  // of what both ranks have on the device
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const MemoryReport& memory = outcome.memory[rank];
      EXPECT_EQ(memory.planned, memory.measured_peak) << stage;
      const std::uint64_t sums = memory.planned[MemoryState::kReduced];
      EXPECT_GT(sums, 0U) << stage;
      EXPECT_EQ(in_host[rank].rows[kReduced], (TierBytes{.host = sums})) << stage;
      EXPECT_EQ(on_device[rank].rows[kReduced], (TierBytes{.device = sums})) << stage;
      EXPECT_GE(on_device[rank].total().device, in_host[rank].total().device + sums) << stage;
      limit += on_device[rank].total().device - sums / 2;
    }
    OnFakeGpu small(2, /*over_nccl=*/false);
    small.limit_memory(limit);
    EXPECT_THAT(message_of(small.prepared(beside(training, kHostStates))), HasSubstr("[OUT_OF_MEMORY]")) << stage;
    EXPECT_EQ(difference(expected, small.train(with_gradients_beside(beside(training, kHostStates)))), "") << stage;
    fake.expect_clean();
  }
}

TEST(ToyOnDevice, BlocksThatTheEngineChoosesAreLongerBesideIt) {
  const auto block_of = [](ToyTraining training, bool chooses, auto&& train) {
    training.plan.residency.chooses_blocks = chooses;
    std::int64_t block = 0;
    training.at_start = [&block](Engine& engine, ToyModel&) {
      if (engine.rank() == 0) block = engine.settings().plan.residency.block_elements;
    };
    (void)train(training);
    return block;
  };
  OnFakeGpu fake(2, /*over_nccl=*/false);
  const auto on_device = [&](const ToyTraining& training) { return fake.train(training); };
  const ToyTraining training = beside(tiny(1, 2), kHostStates);
  EXPECT_EQ(block_of(training, true, on_device), kBlockBesideDevice);
  EXPECT_EQ(block_of(training, false, on_device), 1024);
  EXPECT_EQ(block_of(training, true, [](const ToyTraining& one) { return train_toy(one); }), 1024);
}

TEST(ToyOnDevice, OnRanksOfACpuGradientsInHostMemoryAreAnotherColumnOfTheSamePlan) {
  constexpr auto kReduced = static_cast<std::size_t>(MemoryState::kReduced);
  for (const int stage : {1, 3}) {
    ToyTraining training = tiny(stage, 2);
    training.micro_steps = 3;
    std::vector<TierTable> on_device;
    std::vector<TierTable> in_host;
    const ToyOutcome expected = train_toy(with_tiers(training, on_device));
    const ToyOutcome outcome = train_toy(with_tiers(with_gradients_beside(training), in_host));
    EXPECT_EQ(difference(expected, outcome), "") << stage;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(outcome.memory[rank].planned, expected.memory[rank].planned) << stage;
      EXPECT_EQ(outcome.memory[rank].measured_peak, expected.memory[rank].measured_peak) << stage;
      EXPECT_EQ(in_host[rank].rows[kReduced].host, on_device[rank].rows[kReduced].device) << stage;
      EXPECT_EQ(in_host[rank].rows[kReduced].device, 0U) << stage;
    }
  }
}

/// Where a training of a checkpoint has its states: as Beside, or in the memory of a CPU.
constexpr int kOnCpu = kNumBeside;

ToyOutcome train_where(const ToyTraining& training, int where, bool gradients_beside) {
  if (where == kOnCpu) return train_toy(training);
  OnFakeGpu fake(training.world, /*over_nccl=*/false);
  const ToyTraining offloaded = beside(training, where);
  ToyOutcome outcome = fake.train(gradients_beside ? with_gradients_beside(offloaded) : offloaded);
  fake.expect_clean();
  return outcome;
}

// where states are at the save, where at the load, stage there, and there, dtype, behind the training, after two steps
// or within the third, when the update runs, gradients beside the device there, and there, ranks, policy
const std::vector<int> kSaveLevels{kNumBeside + 1, kNumBeside + 1, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2};

bool can_be_saved(const FactorRow& row) {
  const auto delays = [](int where) { return where < kHostParameters || where == kOnCpu; };
  return row[7] == 0 || (delays(row[0]) && delays(row[1]));
}

void expect_resumes(const FactorRow& row) {
  std::string text = "factors";
  for (const int level : row) text += " " + std::to_string(level);
  const bool inside = row[6] == 1;
  const bool behind = row[5] == 1;
  const auto training_at = [&row](int stage) {
    const int delayed = row[7] == 1 ? 2 : 0;
    ToyTraining training = training_of({stage, row[10] + 1, row[4], 0, 0, row[6], delayed, 0, 0, 0, row[11]});
    training.reports_memory = false;
    return training;
  };
  const CheckpointFolder folder;
  const auto save = [&folder, behind](Engine& engine) {
    if (behind) {
      (void)engine.save_async(folder.text());
    } else {
      (void)engine.save(folder.text());
    }
  };
  ToyTraining saving = training_at(row[2]);
  saving.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 2 && !inside) save(engine);
  };
  saving.after_micro_step = [&](Engine& engine, int step, int ended) {
    if (step == 2 && ended == 1 && inside) save(engine);
  };
  const ToyOutcome expected = train_toy(training_at(row[2]));
  EXPECT_EQ(difference(expected, train_where(saving, row[0], row[8] == 1)), "") << text;
  ToyTraining resumed = training_at(row[3]);
  resumed.first_step = 2;
  resumed.first_micro_step = inside ? 1 : 0;
  resumed.model_seed = 99;  // other values, which must all be replaced
  resumed.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  const ToyOutcome rest = train_where(resumed, row[1], row[9] == 1);
  EXPECT_EQ(std::vector(expected.norms.begin() + 2, expected.norms.end()), rest.norms) << text;
  EXPECT_TRUE(expected.values == rest.values) << text;
}

TEST(ToyOnDevice, CheckpointsGoFromAndToWhateverRestsBesideIt) {
  // From each to the CPU and back, and each to another one.
  FactorRow row(kSaveLevels.size(), 0);
  for (int where = 0; where < kNumBeside; ++where) {
    for (const auto& [from, to] : {std::pair{where, kOnCpu}, {kOnCpu, where}, {where, (where + 3) % kNumBeside}}) {
      for (std::size_t factor = 2; factor < row.size(); ++factor)
        row[factor] = (row[factor] + 1 + (factor % 3 == 0 ? where % 2 : 0)) % kSaveLevels[factor];
      row[0] = from;
      row[1] = to;
      if (!can_be_saved(row)) row[7] = 0;
      expect_resumes(row);
    }
  }
}

TEST(LongToyOnDevice, CheckpointsGoFromAndToWhateverRestsBesideIt) {
  for (const FactorRow& row : covering_array(kSaveLevels, 2, can_be_saved)) expect_resumes(row);
}

TEST(ToyOnDevice, BucketsAreFilledAgainAndUnitsUpdatedOnlyWhenSumsHaveLandedHoweverLateCopiesAre) {
  for (const bool inside : {false, true}) {
    ToyTraining training = tiny(2, 2);
    training.clipping = inside ? 0.0 : 0.5;
    training = with_update(std::move(training), {.inside_backward = inside});
    const ToyOutcome expected = train_toy(training);
    training = with_gradients_beside(beside(training, kHostStates));
    training.plan.residency.slots = 16;  // for all sums of a backward
    OnFakeGpu fake(2, /*over_nccl=*/false);
    fake.run_later(8);
    EXPECT_EQ(difference(expected, fake.train(training)), "") << inside;
    fake.expect_clean();
  }
}

TEST(ToyOnDevice, CopiesWaitWhereNoMemoryCanBePinned) {
  ToyTraining training = tiny(3, 2);
  OnFakeGpu fake(2, /*over_nccl=*/false);
  fake.refuse_to_pin_above(16'000);
  EXPECT_EQ(difference(train_toy(training), fake.train(beside(training, kHostStates))), "");
  fake.expect_clean();
}

/// A rule of the host alone, with states of every shape that an update may ask for.
class HostRule final : public Optimizer {
 public:
  std::string_view name() const override { return "HostRule"; }
  std::vector<StateDeclaration> states() const override {
    return {{.name = "momentum"},
            {.name = "rows", .shape = StateShape::kRow, .initial = 1.0},
            {.name = "count", .shape = StateShape::kTensor}};
  }
  void step(const StepBlock& block, Kernels& kernels, const Stream&) const override {
    (void)kernels.host(name());
    auto* const momentum = reinterpret_cast<float*>(block.states[0]);
    auto* const row = reinterpret_cast<float*>(block.states[1]);
    auto* const count = reinterpret_cast<float*>(block.states[2]);
    *row += 0.25F;
    *count += 1.0F;
    for (std::int64_t i = 0; i < block.n; ++i) {
      const float grad = reinterpret_cast<const float*>(block.grad)[i] * static_cast<float>(block.factor);
      momentum[i] = 0.5F * momentum[i] + grad;
      block.set_value(i, block.value<float>(i) - 0.01F * momentum[i] / *row);
    }
  }
};

TEST(ToyOnDevice, AnOptimizerWithoutAKernelTrainsWithStatesInHostMemory) {
  for (const int stage : {0, 3}) {
    ToyTraining training = tiny(stage, 2);
    training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
      settings.own_optimizer = [] { return std::make_unique<HostRule>(); };
    };
    OnFakeGpu fake(2, /*over_nccl=*/false);
    const ToyOutcome outcome = fake.train(beside(training, kHostStates));
    EXPECT_EQ(difference(train_toy(training), outcome), "") << stage;
    for (const MemoryReport& memory : outcome.memory) EXPECT_EQ(memory.planned, memory.measured_peak);
    fake.expect_clean();
  }
}

class OnlyOnHost final : public Optimizer {
 public:
  std::string_view name() const override { return "OnlyOnHost"; }
  std::vector<StateDeclaration> states() const override { return {}; }
  void step(const StepBlock&, Kernels& kernels, const Stream&) const override { (void)kernels.host(name()); }
};

TEST(ToyOnDevice, AnOptimizerWithoutAKernelIsRefusedBeforeAnythingIsAllocated) {
  ToyTraining training = tiny(1, 2);
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.own_optimizer = [] { return std::make_unique<OnlyOnHost>(); };
  };
  OnFakeGpu fake(2, /*over_nccl=*/false);
  EXPECT_THAT(message_of(fake.prepared(training)),
              AllOf(HasSubstr("no kernel for the device of its states"), HasSubstr("OnlyOnHost")));
}

}  // namespace
}  // namespace zeroth::test
