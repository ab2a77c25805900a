// Weights that several units share, and losses that some ranks' parameters have no part in.
#include "adapter_checks.h"

#include <gtest/gtest.h>

namespace zeroth::test {
namespace {

/// tanh(x W' + b), where W may be somebody else's too.
struct LeafImpl : torch::nn::Module {
  LeafImpl(const Tensor& shared, torch::Generator& generator) {
    weight = register_parameter("weight", shared);
    bias = register_parameter("bias", torch::randn({kWidth}, generator, torch::kFloat64) * 0.1);
  }
  Tensor forward(const Tensor& x) { return torch::tanh(torch::linear(x, weight, bias)); }
  Tensor weight{}, bias{};
};
TORCH_MODULE(Leaf);

/// Two units with one weight: it belongs to the unit around both.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(torch::Generator& generator) {
    const Tensor weight = (torch::randn({kWidth, kWidth}, generator, torch::kFloat64) * 0.1).set_requires_grad(true);
    one = register_module("one", libtorch::Unit<Leaf>(Leaf(weight, generator)));
    two = register_module("two", libtorch::Unit<Leaf>(Leaf(weight, generator)));
  }
  Tensor forward(const Tensor& x) { return x + two->forward(one->forward(x)); }
  libtorch::Unit<Leaf> one{nullptr}, two{nullptr};
};
TORCH_MODULE(Pair);

struct PairsImpl : torch::nn::Module {
  PairsImpl() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    first = register_parameter("first", torch::randn({kWidth, 5}, generator, torch::kFloat64));
    for (int pair = 0; pair < 3; ++pair) {
      pairs.push_back(register_module("pair" + std::to_string(pair), libtorch::Unit<Pair>(Pair(generator))));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = torch::linear(x, first);
    for (auto& pair : pairs) h = pair->forward(h);
    return h.square().mean();
  }
  Tensor first{};
  std::vector<libtorch::Unit<Pair>> pairs{};
};
TORCH_MODULE(Pairs);

TEST(SharedWeights, BelongToTheLowestUnitAroundTheirUses) {
  (void)expect_equal_at_all_stages(2, [](int stage, const World& world) {
    at::set_num_threads(1);
    Pairs model;
    libtorch::Engine<PairsImpl> engine(model, config_of(stage), world, quiet());
    const ModelLayout& layout = engine.core().layout();
    Values losses;
    int shared = 0;
    for (std::size_t param = 0; param < layout.params.size(); ++param) {
      if (layout.params[param].aliases.empty()) continue;
      ++shared;
      const std::string& unit = layout.units[static_cast<std::size_t>(layout.places[param].unit)].name;
      require(layout.params[param].name.starts_with(unit + ".") && unit.starts_with("pair") &&
                  unit.find('.') == std::string::npos,
              layout.params[param].name + " lies in unit " + unit);
    }
    require(shared == 3, std::to_string(shared) + " shared weights");
    for (int step = 0; step < 4; ++step) {
      const Tensor loss = engine.forward(batch(world.rank(), step));
      engine.backward(loss);
      require(engine.step().committed, "a step was skipped");
      const double value = engine.core().average(loss.item<double>());
      const auto* bytes = reinterpret_cast<const std::byte*>(&value);
      losses["step" + std::to_string(step)].assign(bytes, bytes + sizeof value);
    }
    return losses;
  });
}

TEST(ForeignLosses, ContributeNothingAndNobodyWaits) {
  (void)expect_equal_at_all_stages(3, [](int stage, const World& world) {
    Trainee trainee({}, config_of(stage), world);
    const Tensor own = torch::ones({3}, torch::TensorOptions().dtype(torch::kFloat64).requires_grad(true));
    for (int step = 0; step < 3; ++step) {
      if (world.rank() == 1 && step == 1) {
        trainee.engine.backward(own.square().sum());  // nothing of the model in it
      } else {
        trainee.engine.backward(trainee.loss(step));
      }
      require(trainee.engine.step().committed, "a step was skipped");
    }
    return trainee.values();
  });
}

}  // namespace
}  // namespace zeroth::test
