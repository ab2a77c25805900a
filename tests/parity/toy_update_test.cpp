// When an update runs: inside backward, or one step late, with the bits of a step that is whole before its update
// begins; and what happens to a step that cannot be committed.
#include "support/checkpoint_folder.h"
#include "support/covering_array.h"
#include "support/toy_training.h"
#include "toy_engine.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/comm/factory.h>
#include <zeroth/io/io_queue.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16};
constexpr const char* kOptimizers[] = {"AdamW", "SGD"};

/// Changes settings behind what a training does to them already.
void set(ToyTraining& training, const std::function<void(EngineSettings&)>& change) {
  training.tamper = [before = training.tamper, change](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    change(settings);
  };
}

void inside_backward(ToyTraining& training) {
  set(training, [](EngineSettings& settings) { settings.update.inside_backward = true; });
}

void rest_in_files(ToyTraining& training) {
  training.plan.residency = {.optimizer = Residency::kFiles, .block_elements = 1024, .slots = 4};
  set(training, [](EngineSettings& settings) {
    settings.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
  });
}

/// How often the update of a unit began inside of a backward, over all ranks.
std::shared_ptr<std::atomic<int>> count_early(ToyTraining& training) {
  auto count = std::make_shared<std::atomic<int>>(0);
  training.at_start = [before = training.at_start, count](Engine& engine, ToyModel& model) {
    if (before) before(engine, model);
    model.set_update_watcher([count](int) { ++*count; });
  };
  return count;
}

// stage, ranks, micro-steps, dtype, in files (nothing, states, parameters too), transport, optimizer, execution,
// policy, clipping
const std::vector<int> kLevels{4, 3, 2, 2, 3, 2, 2, 2, 2, 2};

ToyTraining training_of(const FactorRow& row) {
  ToyTraining training = small(row[0], row[1] + 1);
  training.steps = 4;
  training.micro_steps = row[2] == 0 ? 1 : 3;
  training.model = {
      .width = 40, .blocks = 4, .dtype = kDtypes[row[3]], .reuse_last = row[3] == 0, .tie_first_two = true};
  training.model.frozen_blocks = {2};
  training.model.round_gradients = true;
  training.transport = row[5] == 0 ? ThreadTransport::kMemory : ThreadTransport::kMessages;
  training.optimizer = kOptimizers[row[6]];
  training.plan.policy = row[8] == 0 ? ReductionPolicy::kPerMicroStep : ReductionPolicy::kPerStep;
  training.clipping = row[9] == 0 ? 0.0 : 0.1;
  if (row[9] != 0) set(training, [](EngineSettings& settings) { settings.update.clip_by = ClipBy::kPreviousNorm; });
  return training;
}

ToyTraining other_way(ToyTraining training, const FactorRow& row) {
  training.mode = row[7] == 0 ? ExecutionMode::kInline : ExecutionMode::kChaos;
  if (row[4] == 0) return training;
  rest_in_files(training);
  if (row[4] == 2) training.plan.residency.parameter = Residency::kFiles;
  return training;
}

std::string text_of(const FactorRow& row) {
  std::string text;
  for (const int level : row) text += std::to_string(level) + " ";
  return text;
}

/// Where the last rank that closes a unit finds all sums that it needs: at stage 0 it needs those of others, and tasks
/// of streams run when chaos wants.
bool must_begin(const FactorRow& row) {
  return (row[0] != 0 || row[1] == 0) && row[7] == 0;
}

void expect_the_bits_of_an_update_after_the_vote(const FactorRow& row) {
  const ToyTraining after = training_of(row);
  ToyTraining inside = other_way(after, row);
  inside_backward(inside);
  const auto early = count_early(inside);
  const ToyOutcome got = train_toy(inside);
  EXPECT_EQ(difference(train_toy(after), got), "") << text_of(row);
  for (const MemoryReport& memory : got.memory) EXPECT_EQ(memory.planned, memory.measured_peak) << to_text(memory);
  EXPECT_TRUE(early->load() > 0 || !must_begin(row)) << text_of(row);
}

TEST(InsideBackward, HasTheBitsOfAnUpdateAfterTheVote) {
  for (const FactorRow& row : covering_array(kLevels, 2, {})) expect_the_bits_of_an_update_after_the_vote(row);
}

TEST(LongInsideBackward, HasTheBitsOfAnUpdateAfterTheVote) {
  for (const FactorRow& row : covering_array(kLevels, 3, {})) expect_the_bits_of_an_update_after_the_vote(row);
}

/// Runs `change` on every block before the optimizer does.
class Changed final : public Optimizer {
 public:
  Changed(const OptimizerOptions& options, std::function<void(StepBlock&)> change)
      : inner_(make_optimizer(options)), change_(std::move(change)) {}
  std::string_view name() const override { return inner_->name(); }
  std::vector<StateDeclaration> states() const override { return inner_->states(); }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    StepBlock changed = block;
    change_(changed);
    inner_->step(changed, kernels, stream);
  }

 private:
  std::unique_ptr<Optimizer> inner_;
  std::function<void(StepBlock&)> change_;
};

constexpr double kClip = 0.1;

/// By hand: the norm of step t - 1 clips step t, and step 0 is clipped by its own.
double coefficient(const std::vector<double>& norms, std::size_t step) {
  return std::min(1.0, kClip / (norms[step == 0 ? 0 : step - 1] + 1e-6));
}

TEST(ClipByThePreviousNorm, IsClippingByHand) {
  ToyTraining clipped = small(1, 2);
  clipped.clipping = kClip;
  set(clipped, [](EngineSettings& settings) { settings.update.clip_by = ClipBy::kPreviousNorm; });
  const ToyOutcome got = train_toy(clipped);
  std::vector<double> norms;
  for (const StepResult& result : got.results) norms.push_back(result.grad_norm);
  for (std::size_t step = 0; step < norms.size(); ++step)
    EXPECT_EQ(got.results[step].clip_coefficient, coefficient(norms, step)) << step;
  ToyTraining by_hand = small(1, 2);
  by_hand.clipping = 0.0;
  set(by_hand, [norms](EngineSettings& settings) {
    settings.own_optimizer = [norms, options = settings.optimizer] {
      return std::make_unique<Changed>(options, [norms](StepBlock& block) {
        block.factor *= coefficient(norms, static_cast<std::size_t>(block.step - 1));
      });
    };
  });
  EXPECT_EQ(difference(train_toy(by_hand), got), "");
  ToyTraining exact = small(1, 2);
  exact.clipping = kClip;
  EXPECT_NE(difference(train_toy(exact), got), "");
}

/// By hand: from step `after` on a block gets the gradient that it should have had a step before.
class OneStepLate final : public Optimizer {
 public:
  OneStepLate(const OptimizerOptions& options, std::int64_t after) : inner_(make_optimizer(options)), after_(after) {}
  std::string_view name() const override { return inner_->name(); }
  std::vector<StateDeclaration> states() const override { return inner_->states(); }
  void step(const StepBlock& block, Kernels& kernels, const Stream& stream) const override {
    if (block.step <= after_) return inner_->step(block, kernels, stream);
    Late& late = late_[block.param];
    const Late next{.grad = {block.grad, block.grad + array_bytes(block.n, block.dtype)}, .block = block};
    if (!late.grad.empty()) {
      StepBlock before = block;
      before.grad = late.grad.data();
      before.factor = late.block.factor;
      before.step = late.block.step;
      before.hyper = late.block.hyper;
      inner_->step(before, kernels, stream);
    }
    late = next;
  }

 private:
  struct Late {
    std::vector<std::byte> grad{};
    StepBlock block{};
  };
  std::unique_ptr<Optimizer> inner_;
  std::int64_t after_;
  mutable std::map<std::byte*, Late> late_;
};

constexpr std::int64_t kAfter[] = {0, 2};

ToyTraining delayed(ToyTraining training, std::int64_t after) {
  set(training, [after](EngineSettings& settings) { settings.update.delayed_after = after; });
  return training;
}

// As kLevels, but the last one is the first delayed step.
void expect_an_update_one_step_late(const FactorRow& row) {
  FactorRow resting = row;
  resting[0] = 0;
  resting[5] = 0;
  const std::int64_t after = kAfter[row[9]];
  const auto with_steps = [](ToyTraining training) {
    training.steps = 6;
    training.clipping = kClip;
    training.tamper = {};
    return training;
  };
  ToyTraining by_hand = with_steps(training_of(resting));
  set(by_hand, [after](EngineSettings& settings) {
    settings.own_optimizer = [after, options = settings.optimizer] {
      return std::make_unique<OneStepLate>(options, after);
    };
  });
  ToyTraining training = delayed(other_way(with_steps(training_of(row)), row), after);
  const auto early = count_early(training);
  const ToyOutcome got = train_toy(training);
  EXPECT_EQ(difference(train_toy(by_hand), got), "") << text_of(row);
  EXPECT_NE(difference(train_toy(with_steps(training_of(row))), got), "") << text_of(row);
  for (const MemoryReport& memory : got.memory) EXPECT_EQ(memory.planned, memory.measured_peak) << to_text(memory);
  for (std::size_t step = 0; step < got.results.size(); ++step)
    EXPECT_EQ(got.results[step].delayed, static_cast<std::int64_t>(step) >= after) << text_of(row);
  EXPECT_TRUE(early->load() > 0 || !must_begin(row)) << text_of(row);
}

TEST(DelayedUpdate, IsAnUpdateOneStepLateByHand) {
  for (const FactorRow& row : covering_array(kLevels, 2, {})) expect_an_update_one_step_late(row);
}

TEST(LongDelayedUpdate, IsAnUpdateOneStepLateByHand) {
  for (const FactorRow& row : covering_array(kLevels, 3, {})) expect_an_update_one_step_late(row);
}

TEST(DelayedUpdate, GradientsWaitInACheckpoint) {
  const auto training_at = [](int stage) {
    ToyTraining training = delayed(small(stage, 2), 1);
    training.clipping = kClip;
    training.left_out = [](int, std::int64_t, int block) { return block == 1; };  // no gradient waits for that bias
    set(training, [](EngineSettings& settings) { settings.update.clip_by = ClipBy::kPreviousNorm; });
    return training;
  };
  const CheckpointFolder folder;
  ToyTraining whole = training_at(2);
  whole.after_step = [&folder](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 3) (void)engine.save(folder.text());
  };
  const ToyOutcome expected = train_toy(whole);
  ToyTraining resumed = training_at(3);
  rest_in_files(resumed);
  resumed.first_step = 3;
  resumed.model_seed = 99;
  resumed.at_start = [&folder](Engine& engine, ToyModel&) {
    (void)engine.load(folder.text());
    EXPECT_TRUE(engine.has_delayed_update());
  };
  EXPECT_EQ(train_toy(resumed).values, expected.values);
  ToyTraining other = small(2, 2);
  other.at_start = [&folder](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
  EXPECT_THAT(message_of(other),
              AllOf(HasSubstr("[CHECKPOINT]"), HasSubstr("delayed_after"), HasSubstr("flush_update")));
}

TEST(DelayedUpdate, FlushIsTheUpdateNow) {
  // Flushed after every step, an update is not late.
  for (const int stage : {0, 1, 3}) {
    ToyTraining flushed = delayed(small(stage, 2), 0);
    flushed.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
      EXPECT_TRUE(result.delayed);
      engine.flush_update();
      EXPECT_FALSE(engine.has_delayed_update());
    };
    EXPECT_EQ(difference(train_toy(small(stage, 2)), train_toy(flushed)), "") << stage;
  }
}

TEST(DelayedUpdate, ASkippedStepLosesItsOwnGradientsOnly) {
  // Steps 0, 1, 3 and 4 count: step 2 is poisoned, and what waits from step 1 is applied in it.
  ToyTraining skipping = delayed(small(3, 2), 0);
  skipping.poison = [](int rank, std::int64_t step, int, int param) { return rank == 1 && step == 2 && param == 3; };
  skipping.steps = 5;
  const ToyOutcome got = train_toy(skipping);
  EXPECT_FALSE(got.results[2].committed);
  EXPECT_TRUE(got.results[2].changed);
  EXPECT_FALSE(got.results[2].delayed);
  ToyTraining flushing = delayed(small(0, 2), 0);
  flushing.poison = skipping.poison;
  flushing.steps = 5;
  flushing.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
    EXPECT_EQ(engine.has_delayed_update(), result.committed);
  };
  EXPECT_EQ(difference(train_toy(flushing), got), "");
}

TEST(InsideBackward, AUnitIsUpdatedBeforeTheBackwardOfTheUnitsBeforeIt) {
  std::vector<std::string> events;
  ToyTraining training = small(3, 1);
  training.steps = 1;
  training.clipping = 0.0;
  inside_backward(training);
  training.visitor = [&events](CommBackend&) {
    return [&events](bool backward, int unit) {
      if (backward) events.push_back("backward " + std::to_string(unit));
    };
  };
  training.at_start = [&events](Engine&, ToyModel& model) {
    model.set_update_watcher([&events](int unit) { events.push_back("update " + std::to_string(unit)); });
  };
  (void)train_toy(training);
  const auto at = [&events](const std::string& event) { return std::ranges::find(events, event) - events.begin(); };
  for (int unit = 2; unit <= 5; ++unit) {
    EXPECT_LT(at("backward " + std::to_string(unit)), at("update " + std::to_string(unit)));
    EXPECT_LT(at("update " + std::to_string(unit)), at("backward " + std::to_string(unit - 1)));
  }
}

/// Milliseconds of some steps on one rank, whose backwards compute for a while and whose transfers are slow.
struct Phases {
  double compute_ms = 0;  ///< forward and backward
  double step_ms = 0;
};

Phases phases_of(bool inside) {
  using Clock = std::chrono::steady_clock;
  ToyTraining training = small(1, 1);
  training.model = {.width = 70, .blocks = 6};  // a block has 4,970 parameters, of 5 blocks of states
  training.steps = 5;
  training.clipping = 0.0;
  rest_in_files(training);
  training.plan.residency.slots = 12;  // two units
  set(training, [inside](EngineSettings& settings) {
    settings.storage.engine = IoEngineKind::kThreads;
    settings.update.inside_backward = inside;
  });
  Phases phases;
  Clock::time_point before = Clock::now();
  const auto since = [&before] {
    const Clock::time_point begin = std::exchange(before, Clock::now());
    return std::chrono::duration<double, std::milli>(before - begin).count();
  };
  double compute_ms = 0;
  training.visitor = [&](CommBackend&) {
    return [&](bool backward, int unit) {
      if (unit == ToyTraining::kEndOfBackward) compute_ms = since();
      if (backward && unit >= 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
  };
  training.after_step = [&](Engine&, ToyModel&, const StepResult& result) {
    const double step_ms = since();
    if (result.step <= 2) return;  // the first update reads nothing
    phases.compute_ms += compute_ms;
    phases.step_ms += step_ms;
  };
  arm_failpoints(parse_failpoints("io.threads.transfer:sleep=2"), 0);
  (void)train_toy(training);
  disarm_failpoints();
  return phases;
}

TEST(LongInsideBackward, TransfersRunBesideTheBackward) {
  const Phases after = phases_of(false);
  const Phases inside = phases_of(true);
  const double saved = after.compute_ms + after.step_ms - inside.compute_ms - inside.step_ms;
  std::printf("after the vote: %.0f ms and step() %.0f ms; inside: %.0f and %.0f; hidden %.0f %%\n", after.compute_ms,
              after.step_ms, inside.compute_ms, inside.step_ms, 100 * saved / after.step_ms);
  EXPECT_GT(saved, 0.3 * after.step_ms);
}

TEST(InsideBackward, AStepThatCannotBeCommittedEndsTheTraining) {
  for (const int stage : {1, 3}) {
    ToyTraining training = small(stage, 2);
    training.clipping = 0.0;
    inside_backward(training);
    training.poison = [](int rank, std::int64_t step, int, int param) { return rank == 1 && step == 2 && param == 4; };
    EXPECT_THAT(message_of(training),
                AllOf(HasSubstr("[NONFINITE]"), HasSubstr("weights are torn"), HasSubstr("blocks.0.bias"),
                      HasSubstr("checkpoint"), HasSubstr("inside_backward = false")));
  }
}

TEST(InsideBackward, AStepWhoseFirstGradientIsNotFiniteIsSkippedAsAlways) {
  ToyTraining after = small(3, 1);
  after.clipping = 0.0;
  after.poison = [](int, std::int64_t step, int, int) { return step == 2; };  // as of a loss that is not finite
  ToyTraining inside = after;
  inside_backward(inside);
  const ToyOutcome got = train_toy(inside);
  EXPECT_FALSE(got.results[2].committed);
  EXPECT_EQ(difference(train_toy(after), got), "");
}

TEST(InsideBackward, TornWeightsAreNeitherUsedNorSavedUntilALoad) {
  const CheckpointFolder folder;
  const ToyOptions options{.width = 40, .blocks = 5};
  ToyModel model(options, 7);
  EngineSettings settings;
  settings.plan = zero_plan(2, {"dp"});
  settings.groups = {GroupHyper{}, GroupHyper{}};
  settings.update.inside_backward = true;
  const auto device = make_cpu_device(ExecutionMode::kInline, 0);
  Engine engine(model.structure().params, model.structure().units, settings, *device,
                make_backend("self", {.rank = 0, .size = 1}), model, Logger());
  model.attach(engine);
  (void)model.forward_backward(0, 0);
  (void)engine.step();
  (void)engine.save(folder.text());
  const std::vector<double> saved = model.value(4);
  model.set_poison([](int, std::int64_t step, int, int param) { return step == 1 && param == 4; });
  (void)model.forward_backward(1, 0);
  EXPECT_THAT(text_thrown_by([&] { (void)engine.step(); }), HasSubstr("torn"));
  EXPECT_THAT(text_thrown_by([&] { (void)engine.save(folder.text()); }), HasSubstr("torn"));
  EXPECT_THAT(text_thrown_by([&] { (void)model.forward_backward(2, 0); }), HasSubstr("torn"));
  engine.abandon(/*in_backward=*/false);
  (void)engine.load(folder.text());
  EXPECT_EQ(model.value(4), saved);
  (void)model.forward_backward(2, 0);
  EXPECT_TRUE(engine.step().committed);
}

TEST(InsideBackward, AForwardBeforeStepIsRefused) {
  ToyTraining training = small(1, 2);
  training.clipping = 0.0;
  training.passes = 2;
  inside_backward(training);
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[USAGE]"), HasSubstr("between the last backward of a step and step()")));
}

TEST(InsideBackward, WhatComesAfterTheUpdateOfAUnitIsRefused) {
  const std::pair<std::function<void(Engine&)>, const char*> cases[] = {
      {[](Engine& engine) {
         const std::vector<float> grad(40, 1.0F);  // of blocks.4.bias, once more
         const ParamSpec& spec = engine.layout().params[12];
         engine.grad_ready(12, {reinterpret_cast<const std::byte*>(grad.data()), spec.shape, DType::kFloat32});
       },
       "a gradient after the last one of the step"},
      {[](Engine& engine) { engine.pre_backward(5); }, "a unit is used again after its update has begun"},
      {[](Engine& engine) { engine.set_group(0, GroupHyper{.lr = 7}); }, "hyper-parameters change while"}};
  for (const auto& [call, message] : cases) {
    ToyTraining training = small(1, 1);
    training.clipping = 0.0;
    inside_backward(training);
    Engine* engine = nullptr;
    training.at_start = [&engine](Engine& there, ToyModel&) { engine = &there; };
    training.visitor = [&](CommBackend&) {
      return [&, what = call](bool backward, int unit) {
        if (backward && unit == 2) what(*engine);
      };
    };
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("[USAGE]"), HasSubstr(message)));
  }
}

TEST(InsideBackward, AFailedTransferIsNamed) {
  ToyTraining training = small(1, 2);
  training.clipping = 0.0;
  inside_backward(training);
  rest_in_files(training);
  set(training, [](EngineSettings& settings) { settings.storage.engine = IoEngineKind::kThreads; });
  training.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 2 && engine.rank() == 0)
      arm_failpoints(parse_failpoints("io.threads.transfer@hit=3:errno=EIO"), 0);
  };
  const std::string text = message_of(training);
  disarm_failpoints();
  EXPECT_THAT(text, AllOf(HasSubstr("[IO]"), HasSubstr("Input/output error"), HasSubstr("states of unit")));
}

TEST(InsideBackward, WhatCannotBeIsRefusedByName) {
  const auto text = [](const std::function<void(EngineSettings&)>& change) {
    ToyTraining training = small(1, 1);
    inside_backward(training);
    set(training, change);
    return message_of(training);
  };
  EXPECT_THAT(text([](EngineSettings&) {}), AllOf(HasSubstr("[CONFIG]"), HasSubstr("/zeroth/update/inside_backward"),
                                                  HasSubstr("gradient_clipping"), HasSubstr("previous_norm")));
  EXPECT_THAT(text([](EngineSettings& settings) {
                settings.gradient_clipping = 0.0;
                settings.loss_scaling = {.enabled = true};
              }),
              AllOf(HasSubstr("[CONFIG]"), HasSubstr("loss scale")));
  EXPECT_THAT(text([](EngineSettings& settings) {
                settings.gradient_clipping = 0.0;
                settings.update.delayed_after = 3;
              }),
              AllOf(HasSubstr("[CONFIG]"), HasSubstr("delayed_after = 3")));
}

/// SGD that notes the sums of the first update, rank 0's.
class NotesSums final : public Optimizer {
 public:
  explicit NotesSums(std::vector<float>* sums) : sums_(sums) {}
  std::string_view name() const override { return "NotesSums"; }
  std::vector<StateDeclaration> states() const override { return {}; }
  void step(const StepBlock& block, Kernels&, const Stream&) const override {
    for (std::int64_t i = 0; i < block.n; ++i) {
      const float sum = reinterpret_cast<const float*>(block.grad)[i];
      if (block.step == 1 && sums_ != nullptr) sums_->push_back(sum);
      block.set_value(i, block.value<float>(i) - 0.01F * sum);
    }
  }

 private:
  std::vector<float>* sums_;
};

TEST(RoundedSums, AreTheSumsInBfloat16AtEveryStage) {
  const auto train = [](int stage, DType dtype, bool rounds, std::vector<float>& sums) {
    ToyTraining training = small(stage, 2);
    training.model = {.width = 150, .blocks = 2, .dtype = dtype};  // more than is rounded at a time
    training.model.round_gradients = dtype == DType::kBFloat16;
    training.micro_steps = 3;
    training.steps = 3;
    training.reports_memory = false;
    training.tamper = [rounds, &sums](int rank, ToyStructure&, EngineSettings& settings) {
      settings.update.rounds_sums = rounds;
      settings.own_optimizer = [rank, &sums] { return std::make_unique<NotesSums>(rank == 0 ? &sums : nullptr); };
    };
    return train_toy(training);
  };
  std::vector<float> exact;
  std::vector<float> rounded;
  (void)train(0, DType::kBFloat16, false, exact);
  const ToyOutcome expected = train(0, DType::kBFloat16, true, rounded);
  ASSERT_EQ(exact.size(), rounded.size());
  ASSERT_GT(exact.size(), 45'000U);
  std::size_t changed = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    ASSERT_EQ(static_cast<float>(BFloat16(exact[i])), rounded[i]) << i;
    changed += exact[i] != rounded[i] ? 1 : 0;
  }
  EXPECT_GT(changed, exact.size() / 2);
  for (const int stage : {1, 2, 3}) {
    std::vector<float> sums;
    EXPECT_EQ(difference(expected, train(stage, DType::kBFloat16, true, sums)), "") << stage;
  }
  std::vector<float> plain;
  std::vector<float> float32;
  (void)train(2, DType::kFloat32, false, plain);
  (void)train(2, DType::kFloat32, true, float32);
  EXPECT_EQ(plain, float32) << "nothing to round";
}

}  // namespace
}  // namespace zeroth::test
