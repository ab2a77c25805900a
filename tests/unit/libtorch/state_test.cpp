// States of a LibTorch engine by name: the same bits at every stage; edits, averages, parameters that train later,
// initial values that are made late.
#include "adapter_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {data, data + tensor.nbytes()};
}

TEST(States, AreTheSameAtEveryStageAndGradientsAreWhatTheUpdateTakes) {
  Values expected;
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Trainee trainee(NetOptions{.frozen = {1}}, config_of(stage), world);
      for (int step = 0; step < 2; ++step) trainee.train(step);
      libtorch::EngineBase& engine = trainee.engine;
      Values own;
      for (const char* const kind : {"param", "master", "exp_avg"}) {
        engine.read_states({.kind = kind}, [&](const std::string& name, const Tensor& tensor) {
          own[std::string(kind) + " " + name] = bytes_of(tensor);
        });
      }
      engine.backward(trainee.engine.forward(batch(world.rank(), 7)));
      own["grad"] = bytes_of(engine.full("layer2.weight", "grad"));
      require(engine.step().committed, "the step");
      require(!engine.full("head", "param", {1}).defined() == (world.rank() == 0), "who wants a tensor");
      std::map<std::string, Tensor> whole;
      engine.read_states({}, [&](const std::string& name, const Tensor& tensor) { whole[name] = tensor.view({-1}); });
      for (const libtorch::LocalState& part : engine.local()) {
        require(torch::equal(part.values, whole.at(part.name).slice(0, part.range.begin, part.range.end)), part.name);
      }
      if (world.rank() != 0) return;
      if (stage == 0) expected = own;
      EXPECT_EQ(own == expected, true) << stage;
    });
  }
  EXPECT_GT(expected.size(), 18U);
}

TEST(States, AreWrittenEditedAndAveragedAtEveryStage) {
  expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Trainee trainee(NetOptions{}, config_of(stage), world);
    libtorch::EngineBase& engine = trainee.engine;
    engine.add_average("slow");
    trainee.train(0);
    engine.update_average("slow", 0.5);
    const Tensor weight = trainee.model->layer(1).weight;
    const Tensor before = engine.full("layer1.weight");
    {
      auto gathered = engine.gathered({weight}, {.rank = 0});
      const torch::NoGradGuard no_grad;
      if (world.rank() == 0) weight[3].zero_();
      gathered.finish();
    }
    const Tensor after = engine.full("layer1.weight");
    require(after[3].abs().sum().item<double>() == 0 && torch::equal(after[2], before[2]), "one row is edited");
    {
      auto undone = engine.gathered({weight}, {.rank = libtorch::Writers::kAll});
      const torch::NoGradGuard no_grad;
      weight.fill_(7.0);  // never finished, as after an exception
    }
    require(torch::equal(engine.full("layer1.weight"), after), "what is not finished is undone");

    std::vector<libtorch::NamedTensor> values;
    engine.read_states({.kind = "master", .ranks = {0}},
                       [&](const std::string& name, const Tensor& tensor) { values.emplace_back(name, tensor * 0.5); });
    const libtorch::WeightReport report = engine.load_state_dict(values);
    require(report.missing.empty() && report.unexpected.empty(), "all names");
    require(torch::equal(engine.full("layer1.weight"), after * 0.5), "values of rank 0");
    EXPECT_THAT(thrown_by([&] { (void)engine.load_state_dict({{"other", after}}); }),
                HasSubstr(world.rank() == 0 ? "beyond the model other" : "of another model"));

    const Tensor average = engine.full("layer1.weight", "slow");
    engine.swap_average("slow");
    require(torch::equal(engine.full("layer1.weight"), average), "the average is applied");
    EXPECT_THAT(thrown_by([&] { (void)engine.step(); }), HasSubstr("while an average of weights is applied"));
    engine.swap_average("slow");
    trainee.train(1);
    return trainee.values();
  });
}

TEST(States, FrozenParametersThatAreNamedMayTrainLater) {
  expect_equal_at_all_stages(2, [](int stage, const World& world) {
    Net model(NetOptions{.frozen = {1}});
    libtorch::EngineOptions options = quiet();
    options.trainable_later = [](const std::string& name, const Tensor&) { return name.starts_with("layer1"); };
    libtorch::Engine<NetImpl> engine(model, config_of(stage), world, options);
    const auto train = [&](int step) {
      engine.backward(engine.forward(batch(world.rank(), step)));
      require(engine.step().committed, "the step");
    };
    const Tensor frozen = engine.full("layer1.weight");
    train(0);
    require(torch::equal(engine.full("layer1.weight"), frozen), "it is frozen");
    for (const Tensor& parameter : model->layer(1).parameters()) parameter.set_requires_grad(true);
    train(1);
    require(!torch::equal(engine.full("layer1.weight"), frozen), "it trains");
    Values values;
    engine.read_states({}, [&](const std::string& name, const Tensor& tensor) { values[name] = bytes_of(tensor); });
    return values;
  });
}

TEST(States, InitialValuesMayBeMadeWhenTheyAreSharded) {
  for (const int stage : kStages) {
    run_world(2, [&](const World& world) {
      Net model(NetOptions{});
      std::map<std::string, Tensor> made;
      for (const auto& item : model->named_parameters()) {
        std::string name = item.key();
        if (const auto at = name.find("zeroth_inner."); at != std::string::npos) name.erase(at, 13);
        made[name] = torch::full_like(item.value(), 0.25).detach();
      }
      std::size_t asked = 0;
      libtorch::EngineOptions options = quiet();
      options.initial_value = [&](const std::string& name) {
        ++asked;
        return name == "head" ? Tensor() : made.at(name);
      };
      const Tensor head = model->head.detach().clone();
      libtorch::Engine<NetImpl> engine(model, config_of(stage), world, options);
      require(asked == made.size(), "each once");
      require(torch::equal(engine.full("layer1.weight"), made.at("layer1.weight")), "the values that were made");
      require(torch::equal(engine.full("head"), head), "the values that were there");
      require(engine.memory_report().construction_peak > 0, "what was made is counted");
    });
  }
}

}  // namespace
}  // namespace zeroth::test
