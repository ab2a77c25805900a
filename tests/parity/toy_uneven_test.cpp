// Ranks with different numbers of batches: what Engine::next_batch() makes of them, under every plan and over every
// transport.
#include "support/thread_ranks.h"
#include "support/toy_model.h"

#include <zeroth/base/text.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// batches[epoch][rank]
using Batches = std::vector<std::vector<int>>;

struct Training {
  ToyOptions model{.width = 7, .blocks = 3, .dtype = DType::kFloat64};
  ShardingPlan plan = zero_plan(0, {"dp"});
  ThreadTransport transport = ThreadTransport::kMemory;
  Batches batches{};
  Uneven uneven = Uneven::kJoin;
  int micro_steps = 1;
  ExecutionMode mode = ExecutionMode::kInline;
  SkipRule skip{};
  std::string optimizer = "AdamW";
  std::function<void(Engine&)> begin{};  ///< with the engine just made
  /// Instead of forward, backward and step() with a batch.
  std::function<void(Engine&, ToyModel&, int epoch, int batch)> train{};

  [[nodiscard]] int world() const { return static_cast<int>(batches.front().size()); }
};

struct Outcome {
  std::vector<std::string> norms{};      ///< of each step
  std::vector<std::int64_t> averaged{};  ///< micro-batches of each step
  std::vector<std::vector<double>> values{};
  std::vector<int> trained{};  ///< batches of this rank, one an epoch
  [[nodiscard]] bool operator==(const Outcome&) const = default;
};

EngineSettings settings_of(const Training& training) {
  EngineSettings settings;
  settings.plan = training.plan;
  settings.micro_steps = training.micro_steps;
  settings.optimizer = {.type = training.optimizer};
  settings.groups = {GroupHyper{.lr = 0.02}, GroupHyper{.lr = 0.05}};
  settings.uneven = training.uneven;
  settings.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
  return settings;
}

std::vector<std::vector<double>> values_of(const Engine& engine, ToyModel& model) {
  std::vector<std::vector<double>> values;
  for (std::size_t param = 0; param < engine.layout().params.size(); ++param)
    values.push_back(model.value(static_cast<int>(param)));
  return values;
}

Outcome train_rank(const Training& training, const std::shared_ptr<CommBackend>& backend) {
  const auto device = make_cpu_device(training.mode, 17 + static_cast<std::uint64_t>(backend->rank()));
  ToyModel model(training.model, 7);
  Engine engine(model.structure().params, model.structure().units, settings_of(training), *device, backend, model,
                Logger());
  model.attach(engine);
  if (training.begin) training.begin(engine);
  Outcome own;
  const auto step = [&] {
    const StepResult result = engine.step();
    if (!result.boundary) return;
    own.norms.push_back(hex_float(result.grad_norm));
    own.averaged.push_back(result.batches);
  };
  for (std::size_t epoch = 0; epoch < training.batches.size(); ++epoch) {
    engine.begin_epoch();
    int batch = 0;
    while (
        engine.next_batch(batch < training.batches[epoch][static_cast<std::size_t>(engine.rank())], {.step = step})) {
      if (training.train) {
        training.train(engine, model, static_cast<int>(epoch), batch);
      } else {
        (void)model.forward_backward(static_cast<std::int64_t>(epoch) * 100 + batch, 0, training.skip);
        step();
      }
      ++batch;
    }
    own.trained.push_back(batch);
  }
  own.values = values_of(engine, model);
  engine.barrier();
  return own;
}

struct Result {
  std::vector<Outcome> outcomes{};  ///< by rank
  RankReport report{};
};

ThreadRanksOptions options_of(int world, ThreadTransport transport) {
  ThreadRanksOptions options;
  options.abort_on_failure = false;  // each hears it by itself
  options.transport = transport;
  if (transport == ThreadTransport::kLevels) options.comm.nodes = nodes_of_ranks(world, world / 2);
  return options;
}

Result run(const Training& training) {
  Result result;
  result.outcomes.resize(static_cast<std::size_t>(training.world()));
  result.report = try_ranks(
      training.world(),
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        result.outcomes[static_cast<std::size_t>(rank)] = train_rank(training, backend);
      },
      options_of(training.world(), training.transport));
  return result;
}

/// What all ranks agree on.
Outcome trained(const Training& training) {
  Result result = run(training);
  EXPECT_EQ(result.report.text(), "");
  for (const Outcome& outcome : result.outcomes) {
    EXPECT_EQ(outcome.norms, result.outcomes[0].norms);
    EXPECT_EQ(outcome.averaged, result.outcomes[0].averaged);
    EXPECT_EQ(outcome.values, result.outcomes[0].values);
  }
  return result.outcomes[0];
}

/// One rank that has the batches of all: sums of gradients, with a learning rate for their mean. SGD, one micro-step.
std::vector<std::vector<double>> by_one_rank(const Training& training) {
  std::vector<std::vector<double>> values;
  const RankReport report = try_ranks(1, [&](int, const std::shared_ptr<CommBackend>& backend) {
    const auto device = make_cpu_device(ExecutionMode::kInline);
    ToyModel model(training.model, 7);
    EngineSettings settings = settings_of(training);
    settings.plan = zero_plan(0, {"dp"});
    const std::vector<GroupHyper> groups = settings.groups;
    Engine engine(model.structure().params, model.structure().units, settings, *device, backend, model, Logger());
    model.attach(engine);
    for (std::size_t epoch = 0; epoch < training.batches.size(); ++epoch) {
      const std::vector<int>& counts = training.batches[epoch];
      for (int batch = 0; batch < *std::ranges::max_element(counts); ++batch) {
        int active = 0;
        for (int rank = 0; rank < training.world(); ++rank) {
          if (batch >= counts[static_cast<std::size_t>(rank)]) continue;
          ++active;
          model.take_data_of(rank);
          (void)model.forward_backward(static_cast<std::int64_t>(epoch) * 100 + batch, 0);
        }
        for (std::size_t group = 0; group < groups.size(); ++group) {
          GroupHyper hyper = groups[group];
          hyper.lr /= active;
          engine.set_group(static_cast<int>(group), hyper);
        }
        (void)engine.step();
      }
    }
    values = values_of(engine, model);
  });
  EXPECT_EQ(report.text(), "");
  return values;
}

std::vector<ShardingPlan> plans() {
  std::vector<ShardingPlan> all;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
      all.push_back(zero_plan(stage, {"dp"}));
      all.back().policy = policy;
    }
  }
  return all;
}

class UnevenTransport : public ::testing::TestWithParam<ThreadTransport> {};

TEST_P(UnevenTransport, JoinIsTheMeanOverTheBatchesThatThereAre) {
  Training training{.transport = GetParam(), .batches = {{3, 5, 0, 4}, {2, 2, 2, 2}, {0, 0, 3, 0}}, .optimizer = "SGD"};
  for (int stage = 0; stage <= 3; ++stage) {
    training.plan = zero_plan(stage, {"dp"});
    const Outcome got = trained(training);
    EXPECT_THAT(got.averaged, ElementsAre(3, 3, 3, 2, 1, 4, 4, 1, 1, 1));
    const std::vector<std::vector<double>> expected = by_one_rank(training);
    ASSERT_EQ(got.values.size(), expected.size());
    for (std::size_t param = 0; param < expected.size(); ++param) {
      for (std::size_t i = 0; i < expected[param].size(); ++i)
        EXPECT_NEAR(got.values[param][i], expected[param][i], 1e-13) << param << " " << i;
    }
  }
}

TEST_P(UnevenTransport, JoinHasTheSameBitsAtEveryStage) {
  for (const int micro_steps : {1, 2}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Training training{.batches = {{3, 6, 1, 4}, {4, 2, 2, 2}}, .micro_steps = micro_steps};
      training.model.dtype = dtype;
      training.model.round_gradients = true;
      training.model.reuse_last = true;
      training.skip = [](int, std::int64_t step, int block) { return block == 1 && step % 3 == 2; };
      for (const ReductionPolicy policy : {ReductionPolicy::kPerMicroStep, ReductionPolicy::kPerStep}) {
        // Two levels sum along the nodes: other bits.
        training.transport = GetParam() == ThreadTransport::kLevels ? GetParam() : ThreadTransport::kMemory;
        training.mode = ExecutionMode::kInline;
        training.plan = zero_plan(0, {"dp"});
        training.plan.policy = policy;
        const Outcome expected = trained(training);
        training.transport = GetParam();
        for (const ShardingPlan& plan : plans()) {
          if (plan.policy != policy) continue;
          for (const ExecutionMode mode : {ExecutionMode::kInline, ExecutionMode::kChaos}) {
            training.plan = plan;
            training.mode = mode;
            EXPECT_EQ(trained(training), expected)
                << plan.name << " " << name_of(dtype) << " " << micro_steps << " " << static_cast<int>(mode);
          }
        }
      }
    }
  }
}

TEST(UnevenFiles, ARankWithoutABatchGivesItsParametersFromFiles) {
  Training training{.batches = {{3, 6, 1}, {4, 2, 2}}};
  const Outcome expected = trained(training);
  for (const int stage : {1, 3}) {
    training.plan = zero_plan(stage, {"dp"});
    training.plan.residency = {.parameter = Residency::kFiles, .block_elements = 1024};
    EXPECT_EQ(trained(training), expected) << stage;
  }
}

TEST(Uneven, RanksThatTakeDifferentPathsWhileOthersAreOut) {
  Training training{.batches = {{3, 6, 1, 4}}};
  training.skip = [](int rank, std::int64_t step, int block) { return (rank + step + block) % 3 == 0; };
  const Outcome expected = trained(training);
  for (const ShardingPlan& plan : plans()) {
    training.plan = plan;
    EXPECT_EQ(trained(training), expected) << plan.name;
  }
}

TEST_P(UnevenTransport, DropEndsWithTheFirst) {
  Training training{.transport = GetParam(), .batches = {{3, 5, 2, 4}, {1, 1, 1, 1}}, .uneven = Uneven::kDrop};
  for (const Outcome& outcome : run(training).outcomes) {
    EXPECT_THAT(outcome.trained, ElementsAre(2, 1));
    EXPECT_THAT(outcome.averaged, ElementsAre(4, 4, 4));
  }
}

TEST_P(UnevenTransport, ErrorNamesWhoHasNoneOnAllRanks) {
  Training training{.transport = GetParam(), .batches = {{3, 5, 3, 4}}, .uneven = Uneven::kError};
  const Result result = run(training);
  ASSERT_EQ(result.report.failures.size(), 4U) << result.report.text();
  for (const RankFailure& failure : result.report.failures) {
    EXPECT_THAT(failure.text, AllOf(HasSubstr("[MISMATCH] ranks 0, 2 have no batch left, ranks 1, 3 have more"),
                                    HasSubstr("after step 3"), HasSubstr("zeroth.uneven = \"join\""),
                                    HasSubstr("who: rank " + std::to_string(failure.rank) + "/4")));
  }
}

TEST_P(UnevenTransport, AveragesBarriersAndDiscardedBatchesAreJoined) {
  Training training{.transport = GetParam(), .batches = {{1, 4, 1, 3}}};
  training.plan = zero_plan(3, {"dp"});
  training.train = [](Engine& engine, ToyModel& model, int, int batch) {
    (void)model.forward_backward(batch, 0);
    if (batch == 1) {
      engine.discard_gradients();
      return;
    }
    engine.barrier();
    require(engine.step().batches == (batch == 0 ? 4 : batch == 2 ? 2 : 1), "batches of step " + std::to_string(batch));
    const double mean = engine.average(engine.rank() + 1.0);
    require(mean == (batch == 0 ? 2.5 : batch == 2 ? 3.0 : 2.0), "mean " + std::to_string(mean));
  };
  EXPECT_EQ(run(training).report.text(), "");
}

TEST_P(UnevenTransport, EvaluationIsJoinedAndAnEpochThatIsLeftEarlyEnds) {
  Training training{.transport = GetParam(), .batches = {{2, 5, 1, 4}, {1, 3, 3, 3}, {2, 1, 2, 1}}};
  training.plan = zero_plan(3, {"dp"});
  const RankReport report = try_ranks(
      4,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const auto device = make_cpu_device(ExecutionMode::kInline);
        ToyModel model(training.model, 7);
        Engine engine(model.structure().params, model.structure().units, settings_of(training), *device, backend, model,
                      Logger());
        model.attach(engine);
        int trained = 0;
        for (int epoch = 0; epoch < 3; ++epoch) {
          engine.begin_epoch();
          int batch = 0;
          // All who have a batch leave the second epoch after two, while rank 0 is out.
          while ((epoch != 1 || batch < 2) &&
                 engine.next_batch(batch <
                                   training.batches[static_cast<std::size_t>(epoch)][static_cast<std::size_t>(rank)])) {
            if (epoch == 0) {
              (void)model.evaluate(batch, 0);
            } else {
              (void)model.forward_backward(batch, 0);
              (void)engine.step();
              ++trained;
            }
            ++batch;
          }
        }
        require(engine.committed_steps() == 4, "steps " + std::to_string(engine.committed_steps()));
        require(trained == (rank == 0 ? 3 : rank == 2 ? 4 : 3), "trained " + std::to_string(trained));
      },
      options_of(4, GetParam()));
  EXPECT_EQ(report.text(), "");
}

TEST_P(UnevenTransport, WhatCannotBeJoinedIsRefusedOnAllRanks) {
  Training training{.transport = GetParam(), .batches = {{1, 3, 3, 3}}};
  std::array<OperationId, 4> exports{};
  training.begin = [&](Engine& engine) {
    exports[static_cast<std::size_t>(engine.rank())] = engine.add_operation({.name = "an export"});
  };
  training.train = [&](Engine& engine, ToyModel& model, int, int batch) {
    (void)model.forward_backward(batch, 0);
    (void)engine.step();
    if (batch == 1) engine.sync(exports[static_cast<std::size_t>(engine.rank())]);
  };
  const Result result = run(training);
  ASSERT_EQ(result.report.failures.size(), 4U) << result.report.text();
  for (const RankFailure& failure : result.report.failures) {
    EXPECT_THAT(failure.text, AllOf(HasSubstr("[USAGE]"), HasSubstr("an export"), HasSubstr("rank 0 without a batch"),
                                    HasSubstr("expected: forward, backward, step(), end_accumulation(), zero_grad(), "
                                              "average() or barrier() until the "
                                              "batches of all ranks are used up"),
                                    HasSubstr("after the loop")));
  }
}

/// A sum of all ranks that a test adds to the engine: its row, and the call. What the tests below find in errors and on
/// ranks without a batch follows from these two.
class Tally {
 public:
  explicit Tally(Engine& engine, bool joined = true) : engine_(&engine) {
    Operation row{.name = "tally()"};
    if (joined) {
      row.join = [this](int) -> std::optional<Next> {
        (void)sum(0);
        ++joined_;
        return std::nullopt;
      };
    }
    operation_ = engine.add_operation(std::move(row));
  }
  double sum(double value) {
    engine_->sync(operation_);
    engine_->communicator().all_reduce(std::span(&value, 1));
    return value;
  }
  [[nodiscard]] int joined() const { return joined_; }

 private:
  Engine* engine_;
  OperationId operation_{};
  int joined_ = 0;
};

/// One a rank, in engines that a Training makes.
struct Tallies {
  std::array<std::unique_ptr<Tally>, 4> all;
  Tally& operator[](const Engine& engine) { return *all[static_cast<std::size_t>(engine.rank())]; }
  std::function<void(Engine&)> begin(bool joined = true) {
    return [this, joined](Engine& engine) {
      all[static_cast<std::size_t>(engine.rank())] = std::make_unique<Tally>(engine, joined);
    };
  }
};

TEST_P(UnevenTransport, AnOperationIsARowAndIsJoined) {
  Training training{.transport = GetParam(), .batches = {{1, 3, 2, 3}}};
  training.plan = zero_plan(3, {"dp"});
  Tallies tallies;
  training.begin = tallies.begin();
  training.train = [&](Engine& engine, ToyModel& model, int, int batch) {
    (void)model.forward_backward(batch, 0);
    (void)engine.step();
    const double sum = tallies[engine].sum(engine.rank() + 1.0);
    require(sum == (batch == 0 ? 10.0 : batch == 1 ? 9.0 : 6.0), "sum " + std::to_string(sum));
  };
  EXPECT_EQ(run(training).report.text(), "");
  EXPECT_EQ(tallies.all[0]->joined(), 2);
  EXPECT_EQ(tallies.all[1]->joined(), 0);
  EXPECT_EQ(tallies.all[2]->joined(), 1);
}

TEST_P(UnevenTransport, AnOperationThatIsARowIsNamedInMismatchesAndRefusals) {
  Training training{.transport = GetParam(), .batches = {{1, 3, 3, 3}}};
  Tallies tallies;
  training.begin = tallies.begin();
  for (const int batch_of_mistake : {0, 1}) {  // with all ranks, and with rank 0 out
    training.train = [&](Engine& engine, ToyModel& model, int, int batch) {
      (void)model.forward_backward(batch, 0);
      (void)engine.step();
      if (batch == batch_of_mistake) (void)(engine.rank() == 2 ? tallies[engine].sum(1) : engine.average(1));
    };
    const std::string text = run(training).report.text();
    EXPECT_THAT(text, AllOf(HasSubstr("[MISMATCH]"), HasSubstr("tally()"), HasSubstr("average()"))) << batch_of_mistake;
  }

  training.begin = [&](Engine& engine) {
    tallies.begin(/*joined=*/false)(engine);
    (void)engine.add_operation({.name = "salute()", .join = [](int) { return std::optional<Next>(); }});
  };
  training.train = [&](Engine& engine, ToyModel& model, int, int batch) {
    (void)model.forward_backward(batch, 0);
    (void)engine.step();
    if (batch == 1) (void)tallies[engine].sum(1);
  };
  const Result result = run(training);
  ASSERT_EQ(result.report.failures.size(), 4U) << result.report.text();
  for (const RankFailure& failure : result.report.failures) {
    EXPECT_THAT(failure.text, AllOf(HasSubstr("[USAGE]"), HasSubstr("which: tally()"),
                                    HasSubstr("average(), barrier() or salute() until the batches")));
  }
}

TEST(Uneven, OperationsHaveNamesOfTheirOwn) {
  const RankReport report = try_ranks(1, [](int, const std::shared_ptr<CommBackend>& backend) {
    const auto device = make_cpu_device(ExecutionMode::kInline);
    ToyModel model({}, 7);
    Engine engine(model.structure().params, model.structure().units, settings_of({}), *device, backend, model,
                  Logger());
    const OperationId first = engine.add_operation({.name = "first"});
    require(engine.add_operation({.name = "second"}) != first, "two rows have one number");
    for (const char* name : {"first", "step()", ""}) {
      try {
        (void)engine.add_operation({.name = name});
      } catch (const Error& error) {
        require(error.code() == ErrorCode::kUsage, error.what());
        continue;
      }
      require(false, std::string("a second operation is called ") + name);
    }
  });
  EXPECT_EQ(report.text(), "");
}

TEST_P(UnevenTransport, RanksThatDoNotDoTheSameWithTheirBatchesAreNamed) {
  Training training{.transport = GetParam(), .batches = {{1, 3, 3, 3}}};
  training.train = [](Engine& engine, ToyModel& model, int, int batch) {
    (void)model.forward_backward(batch, 0);
    if (engine.rank() == 2 && batch == 1) (void)engine.average(1.0);
    (void)engine.step();
  };
  const Result result = run(training);
  ASSERT_EQ(result.report.failures.size(), 4U) << result.report.text();
  EXPECT_THAT(result.report.text(), AllOf(HasSubstr("ranks that have a batch do not do the same with it"),
                                          HasSubstr("step() on rank 1"), HasSubstr("average() on rank 2")));
}

INSTANTIATE_TEST_SUITE_P(All, UnevenTransport,
                         ::testing::Values(ThreadTransport::kMemory, ThreadTransport::kMessages,
                                           ThreadTransport::kLevels),
                         [](const auto& given) {
                           return std::string(given.param == ThreadTransport::kMemory     ? "Memory"
                                              : given.param == ThreadTransport::kMessages ? "Messages"
                                                                                          : "Levels");
                         });

}  // namespace
}  // namespace zeroth::test
