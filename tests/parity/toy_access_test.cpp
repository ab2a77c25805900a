// States of the toy engine by name: the same values under every plan, transport and box; writes, averages, refusals.
#include "support/checkpoint_folder.h"
#include "support/error_of.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"
#include "toy_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Bytes of tensors, by kind and name.
using States = std::map<std::string, std::vector<std::byte>>;

void read(Engine& engine, const std::string& kind, States& into, const std::string& label = "") {
  engine.read_states({.kind = kind}, [&](StateTensor tensor) {
    const std::string key = label + kind + " of " + tensor.name + " " + std::string(name_of(tensor.dtype));
    require(into.emplace(key, std::move(tensor.data)).second, key + " twice");
  });
}

ToyTraining training_of(const ShardingPlan& plan, int world, DType dtype) {
  ToyTraining training = small(0, world);
  training.plan = plan;
  training.steps = 2;
  training.micro_steps = 2;
  training.model.dtype = dtype;
  training.model.frozen_blocks = {1};
  training.model.tie_first_two = true;
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.reports_memory = false;
  return training;
}

/// All states of all kinds, after the second step and between the backward and the end of a third.
States states_of(ToyTraining training) {
  States whole;
  std::mutex mutex;
  training.after_step = [&](Engine& engine, ToyModel& model, const StepResult& result) {
    if (result.step != 2) return;
    States own;
    for (const char* const kind : {"param", "master", "exp_avg", "exp_avg_sq"}) read(engine, kind, own);
    for (int micro_step = 0; micro_step < 2; ++micro_step) {
      (void)model.forward_backward(7, micro_step);
      if (micro_step == 0) {
        EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { read(engine, "grad", own); }),
                    HasSubstr("gradients are not complete"));
        (void)engine.step();
      }
    }
    read(engine, "grad", own);
    for (const StatePart& part : engine.local_states("grad")) {
      const std::vector<std::byte>& all = own.at("grad of " + part.name + " " + std::string(name_of(part.dtype)));
      const std::size_t begin = static_cast<std::size_t>(part.range.begin) * size_of(part.dtype);
      EXPECT_EQ(std::memcmp(all.data() + begin, part.data.data(), part.data.size()), 0) << part.name;
    }
    require(engine.step().committed, "the third step");
    read(engine, "master", own, "after ");
    const std::lock_guard lock(mutex);
    if (whole.empty()) whole = own;
    EXPECT_EQ(whole == own, true) << "rank " << engine.rank();
  };
  (void)train_toy(training);
  return whole;
}

class AccessOf : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, AccessOf, ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(AccessOf, GivesTheSameUnderEveryPlanAndTransport) {
  for (const int world : {1, 3}) {
    const States expected = states_of(training_of(zero_plan(0, {"dp"}), world, GetParam()));
    EXPECT_GT(expected.size(), 40U);
    for (const bool messages : {false, true}) {
      for (const int stage : {0, 1, 2, 3}) {
        ToyTraining training = training_of(zero_plan(stage, {"dp"}), world, GetParam());
        if (messages) training.transport = ThreadTransport::kMessages;
        EXPECT_EQ(states_of(training) == expected, true) << world << " ranks, stage " << stage << " " << messages;
      }
    }
  }
  const States expected = states_of(training_of(zero_plan(0, {"dp"}), 4, GetParam()));
  for (const ShardingPlan& plan : {hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"})})
    EXPECT_EQ(states_of(training_of(plan, 4, GetParam())) == expected, true) << plan.name;
}

TEST_P(AccessOf, GivesTheSameInAnyLegalOrderOfStreams) {
  const States expected = states_of(training_of(zero_plan(0, {"dp"}), 3, GetParam()));
  for (const std::uint64_t seed : {1U, 2U, 3U, 4U}) {
    ToyTraining training = training_of(zero_plan(seed < 3 ? 3 : 2, {"dp"}), 3, GetParam());
    training.mode = ExecutionMode::kChaos;
    training.chaos_seed = seed;
    if (seed % 2 == 0) training.transport = ThreadTransport::kMessages;
    EXPECT_EQ(states_of(training) == expected, true) << seed;
  }
}

TEST(Access, SumsOfGroupsAreReadOnceAndTakeNoFurtherBackward) {
  // Sums of sub-groups are joined by the read; what is joined cannot be added to, and the step takes what was read.
  for (const bool reads : {true, false}) {
    ToyTraining training = small(2, 4);
    training.plan.gradient_degree = 2;
    training.steps = 3;
    training.after_step = [reads](Engine& engine, ToyModel& model, const StepResult& result) {
      if (result.step != 2) return;
      (void)model.forward_backward(7, 0);
      States grads;
      if (reads) {
        read(engine, "grad", grads);
        States again;
        read(engine, "grad", again);
        EXPECT_EQ(grads == again, true);
      }
      require(engine.step().committed, "the step");
      if (!reads) return;
      (void)model.forward_backward(8, 0);
      States joined;
      read(engine, "grad", joined);
      EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)model.forward_backward(9, 0); }),
                  HasSubstr("a backward after the gradients of the step were read"));
      engine.abandon(/*in_backward=*/true);
      EXPECT_THAT(engine.step().reason, HasSubstr("backward failed"));
    };
    static std::vector<std::vector<double>> expected;
    const ToyOutcome outcome = train_toy(training);
    if (expected.empty()) expected = outcome.values;
    EXPECT_EQ(outcome.values, expected) << reads;
  }
}

TEST(Access, WritesReachMastersOnAllRanks) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    for (const bool messages : {false, true}) {
      for (const int stage : {0, 1, 2, 3}) {
        ToyTraining training = training_of(zero_plan(stage, {"dp"}), 3, dtype);
        if (messages) training.transport = ThreadTransport::kMessages;
        training.after_step = [dtype](Engine& engine, ToyModel&, const StepResult& result) {
          if (result.step != 1) return;
          States before;
          for (const char* const kind : {"master", "exp_avg"}) read(engine, kind, before);
          const DType wide = accumulation_dtype(dtype);
          std::vector<std::byte> values(array_bytes(40 * 40, wide));
          for (std::size_t i = 0; i < 1600; ++i) {
            const double value = 0.1 * static_cast<double>(i) + 1e-5;
            const auto single = static_cast<float>(value);
            wide == DType::kFloat64 ? std::memcpy(&values[i * 8], &value, 8) : std::memcpy(&values[i * 4], &single, 4);
          }
          int calls = 0;
          engine.write_weights({.names = {"blocks.2.weight"}, .source = 2, .values = [&](std::size_t) {
                                  ++calls;
                                  return std::span<const std::byte>(values);
                                }});
          EXPECT_EQ(calls, engine.rank() == 2 ? 1 : 0);
          States after;
          for (const char* const kind : {"master", "exp_avg"}) read(engine, kind, after);
          before["master of blocks.2.weight " + std::string(name_of(wide))] = values;
          EXPECT_EQ(before == after, true) << engine.settings().plan.name;
        };
        (void)train_toy(training);
      }
    }
  }
}

TEST(Access, AnAverageIsTheSameUnderEveryPlanAndComesAndGoesToTheBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    States expected;
    for (const int stage : {0, 1, 2, 3}) {
      ToyTraining training = training_of(zero_plan(stage, {"dp"}), 3, dtype);
      training.at_start = [](Engine& engine, ToyModel&) { engine.add_average("slow"); };
      training.after_step = [&](Engine& engine, ToyModel& model, const StepResult& result) {
        engine.update_average("slow", 0.75);
        if (result.step != 2) return;
        States own;
        for (const char* const kind : {"master", "slow"}) read(engine, kind, own);
        const double loss = model.evaluate(3, 0);
        engine.swap_average("slow");
        EXPECT_NE(model.evaluate(3, 0), loss);
        EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { (void)engine.step(); }), HasSubstr("slow"));
        States swapped;
        for (const char* const kind : {"master", "slow"}) read(engine, kind, swapped);
        EXPECT_EQ(swapped.at("master of in.weight float32"), own.at("slow of in.weight float32"));
        EXPECT_EQ(swapped.at("slow of in.weight float32"), own.at("master of in.weight float32"));
        engine.swap_average("slow");
        EXPECT_EQ(model.evaluate(3, 0), loss);
        States back;
        for (const char* const kind : {"master", "slow"}) read(engine, kind, back);
        EXPECT_EQ(back == own, true);
        if (engine.rank() != 0) return;
        if (expected.empty()) expected = own;
        EXPECT_EQ(own == expected, true) << stage;
      };
      training.reports_memory = true;
      for (const MemoryReport& memory : train_toy(training).memory) EXPECT_EQ(memory.planned, memory.measured_peak);
    }
  }
}

TEST(Access, WhatDoesNotExistIsRefusedByName) {
  ToyTraining training = training_of(zero_plan(3, {"dp"}), 2, DType::kFloat32);
  training.steps = 1;
  training.model.frozen_blocks = {3};
  training.after_step = [](Engine& engine, ToyModel& model, const StepResult&) {
    const auto refusal = [&engine](const StateQuery& query) {
      return error_of(ErrorCode::kUsage, [&] { engine.read_states(query, [](const StateTensor&) {}); });
    };
    EXPECT_THAT(refusal({.kind = "exp_av"}), AllOf(HasSubstr("did you mean \"exp_avg\""), HasSubstr("master, grad")));
    EXPECT_THAT(refusal({.names = {"in.weigth"}}), HasSubstr("did you mean \"in.weight\""));
    EXPECT_THAT(refusal({.kind = "exp_avg", .names = {"blocks.3.weight"}}),
                AllOf(HasSubstr("a parameter has no such state"), HasSubstr("blocks.3.weight, exp_avg")));
    EXPECT_THAT(refusal({.ranks = {0, 2}}), HasSubstr("there is no such rank"));
    int found = 0;
    // A tied weight by its other name; frozen parameters are their own masters; nobody has a gradient.
    engine.read_states({.kind = "master", .names = {"blocks.1.weight", "blocks.3.weight"}, .ranks = {1}},
                       [&](const StateTensor& tensor) { found += tensor.shape.size() == 2 ? 1 : 100; });
    engine.read_states({.kind = "grad"}, [&](const StateTensor&) { found = 100; });
    EXPECT_EQ(found, engine.rank() == 1 ? 2 : 0);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { engine.write_weights({.names = {"none"}}); }),
                HasSubstr("there is no such parameter"));
    for (const char* const name : {"", "exp_avg", "a/b", "weight", "grad"})
      EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { engine.add_average(name); }), HasSubstr("a name of its own"));
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { engine.update_average("none", 0.5); }), HasSubstr("none"));
    (void)model.forward_backward(5, 0);
    EXPECT_THAT(error_of(ErrorCode::kUsage, [&] { engine.write_weights({.names = {"in.weight"}}); }),
                HasSubstr("in the middle of a step"));
    engine.discard_gradients();
  };
  (void)train_toy(training);
}

TEST(Access, RanksThatAskForOtherThingsHearOfIt) {
  for (const bool messages : {false, true}) {
    ToyTraining training = training_of(zero_plan(2, {"dp"}), 2, DType::kFloat32);
    if (messages) training.transport = ThreadTransport::kMessages;
    training.after_step = [](Engine& engine, ToyModel&, const StepResult&) {
      engine.read_states({.names = {engine.rank() == 0 ? "in.weight" : "in.bias"}}, [](const StateTensor&) {});
    };
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("in.weight"), HasSubstr("in.bias")));
  }
}

/// Boxes of one tensor on different ranks make the whole of it, and take their part of what is written.
States experts_states(int dense, int experts) {
  States whole;
  std::mutex mutex;
  int done = 0;
  ExpertsTraining training;
  training.dense = zero_plan(dense, {"edp", "ep"});
  training.experts = zero_plan(experts, {"edp"});
  training.before_step = [&](Engine& engine, std::int64_t step) {
    if (step != 3) return;
    States own;
    for (const char* const kind : {"master", "exp_avg", "grad"}) read(engine, kind, own);
    engine.discard_gradients();
    const std::string name = "master of experts.0.weight float32";
    EXPECT_EQ(own.at(name).size(), array_bytes(2 * 40 * 40, DType::kFloat32));
    std::vector<std::byte> turned = own.at(name);
    for (std::size_t i = 0; i < turned.size() / 4; ++i) {
      float value = 0;
      std::memcpy(&value, &own.at(name)[turned.size() - 4 * (i + 1)], 4);
      std::memcpy(&turned[4 * i], &value, 4);
    }
    engine.write_weights({.names = {"experts.0.weight"}, .source = 3, .values = [&](std::size_t) {
                            return std::span<const std::byte>(turned);
                          }});
    States after;
    for (const char* const kind : {"master", "exp_avg"}) read(engine, kind, after);
    States expected = own;
    std::erase_if(expected, [](const auto& state) { return state.first.starts_with("grad"); });
    expected[name] = turned;
    EXPECT_EQ(expected == after, true);
    const std::lock_guard lock(mutex);
    if (whole.empty()) whole = own;
    EXPECT_EQ(whole == own, true);
    ++done;
  };
  const RankReport report = try_ranks(kExpertRanks, [&](int, const std::shared_ptr<CommBackend>& backend) {
    // The step that follows has no gradients any more.
    EXPECT_THAT(error_of(ErrorCode::kUsage,
                         [&] { (void)train_experts_rank(training, backend->split(0, backend->rank(), "job")); }),
                HasSubstr("without a backward"));
  });
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_EQ(done, kExpertRanks);
  return whole;
}

std::vector<std::byte> joined(std::vector<std::byte> first, const std::vector<std::byte>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Two weights are the halves of a table, which is read, written, saved and loaded under its names.
TEST(Access, SeveralBoxesOnARankAreOneTensor) {
  const CheckpointFolder folder;
  std::vector<std::byte> halves;  // of a training in which they are no table
  for (const bool table : {false, true}) {
    ExpertsTraining training;
    training.dense = zero_plan(3, {"edp", "ep"});
    training.experts = zero_plan(3, {"edp"});
    training.tamper = [table](int, std::vector<ParamSpec>& params, EngineSettings&) {
      for (ParamSpec& param : params) {
        if (!table || (param.name != "blocks.0.weight" && param.name != "blocks.2.weight")) continue;
        param.logical_shape = {80, 40};
        param.box_offset = {param.name == "blocks.0.weight" ? 0 : 40, 0};
        param.whole = "table";
        param.aliases = {"head"};
      }
    };
    training.before_step = [&](Engine& engine, std::int64_t step) {
      if (step != 3) return;
      States grads;
      read(engine, "grad", grads);
      engine.discard_gradients();
      States own;
      for (const char* const kind : {"param", "exp_avg"}) read(engine, kind, own);
      if (!table) {
        if (engine.rank() != 0) return;
        for (const char* const of : {"grad of blocks.", "param of blocks.", "exp_avg of blocks."}) {
          const States& from = own.contains(std::string(of) + "0.weight float32") ? own : grads;
          for (const char* const block : {"0.weight float32", "2.weight float32"})
            halves = joined(std::move(halves), from.at(std::string(of) + block));
        }
        return;
      }
      const std::vector<std::byte> all =
          joined(joined(grads.at("grad of table float32"), own.at("param of table float32")),
                 own.at("exp_avg of table float32"));
      EXPECT_EQ(all == halves, true);
      std::vector<std::byte> turned = own.at("param of table float32");
      for (std::size_t i = 0; i < turned.size() / 4; ++i)
        std::memcpy(&turned[4 * i], &own.at("param of table float32")[turned.size() - 4 * (i + 1)], 4);
      const auto write = [&](const std::vector<std::byte>& values) {
        engine.write_weights({.names = {"head"}, .source = 3, .values = [&values](std::size_t) {
                                return std::span<const std::byte>(values);
                              }});
      };
      write(turned);
      (void)engine.save(folder.text());
      write(std::vector<std::byte>(turned.size()));
      const LoadReport report = engine.load(folder.text());
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      std::vector<std::string> names;
      for (const CheckpointParam& param : report.manifest.params) names.push_back(param.name);
      EXPECT_EQ(std::ranges::count(names, "table"), 1);
      EXPECT_EQ(std::ranges::count_if(names, [](const auto& name) { return name.starts_with("blocks."); }), 1);
      States after;
      for (const char* const kind : {"param", "exp_avg"}) read(engine, kind, after);
      own["param of table float32"] = turned;
      EXPECT_EQ(own == after, true);
    };
    const RankReport report = try_ranks(kExpertRanks, [&](int, const std::shared_ptr<CommBackend>& backend) {
      EXPECT_THAT(error_of(ErrorCode::kUsage,
                           [&] { (void)train_experts_rank(training, backend->split(0, backend->rank(), "job")); }),
                  HasSubstr("without a backward"));
    });
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

TEST(Access, BoxesOfExpertsAreOneTensor) {
  const States expected = experts_states(0, 0);
  EXPECT_GT(expected.size(), 8U);
  EXPECT_EQ(experts_states(3, 2) == expected, true);
  EXPECT_EQ(experts_states(1, 3) == expected, true);
}

}  // namespace
}  // namespace zeroth::test
