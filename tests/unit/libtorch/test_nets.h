// A small residual network of units, and steps of training it, for the tests of the adapter.
#pragma once

#include "support/torch_ranks.h"

#include <zeroth/libtorch/engine.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace zeroth::test {

using torch::Tensor;

inline constexpr std::int64_t kWidth = 40;

struct NetOptions {
  int layers = 3;
  std::uint64_t seed = 3;
  torch::Dtype dtype = torch::kFloat64;
  std::vector<int> frozen{};  ///< layers whose parameters are all frozen
  bool freeze_first = false;
  bool freeze_ends = false;  ///< `first` and `head`
  double dropout = 0;        ///< with torch's default generator
  std::vector<std::int64_t>
      extra{};  ///< if not empty, each layer has a parameter `extra` of this shape that it does not use
};

/// x + tanh(x W' + b). `probe` runs in the middle of the forward.
struct LayerImpl : torch::nn::Module {
  LayerImpl(const NetOptions& options, torch::Generator& generator, bool trainable) : dropout(options.dropout) {
    weight = register_parameter("weight", torch::randn({kWidth, kWidth}, generator, options.dtype) * 0.1, trainable);
    bias = register_parameter("bias", torch::randn({kWidth}, generator, options.dtype) * 0.1, trainable);
    if (!options.extra.empty()) extra = register_parameter("extra", torch::ones(options.extra, options.dtype));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = torch::linear(x, weight, bias);
    if (probe) probe(*this, y);
    return x + torch::dropout(torch::tanh(y), dropout, dropout > 0);
  }
  double dropout;
  std::function<void(LayerImpl&, const Tensor& y)> probe{};
  Tensor weight{}, bias{}, extra{};
};
TORCH_MODULE(Layer);

/// mean (head tanh(layers(first x)))^2
struct NetImpl : torch::nn::Module {
  explicit NetImpl(const NetOptions& options) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    first = register_parameter("first", torch::randn({kWidth, 5}, generator, options.dtype),
                               !options.freeze_ends && !options.freeze_first);
    head = register_parameter("head", torch::randn({2, kWidth}, generator, options.dtype) * 0.3, !options.freeze_ends);
    for (int layer = 0; layer < options.layers; ++layer) {
      const bool trainable = std::ranges::find(options.frozen, layer) == options.frozen.end();
      layers.push_back(register_module("layer" + std::to_string(layer),
                                       libtorch::Unit<Layer>(Layer(options, generator, trainable))));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = torch::linear(x, first);
    for (auto& layer : layers) h = between ? between(layer->forward(h)) : layer->forward(h);
    return torch::linear(torch::tanh(h), head).square().mean();
  }
  LayerImpl& layer(std::size_t index) { return *layers[index]->inner(); }
  std::function<Tensor(Tensor)> between{};  ///< what happens to a layer's output
  Tensor first{}, head{};
  std::vector<libtorch::Unit<Layer>> layers{};
};
TORCH_MODULE(Net);

inline Config config_of(int stage, int micro_steps = 1) {
  Config config;
  config.gradient_accumulation_steps = micro_steps;
  config.optimizer.lr = 1e-2;
  config.optimizer.weight_decay = 0.1;
  config.zero.stage = stage;
  config.runtime.threads = 1;
  config.runtime.timeout_ms = 60'000;
  return config;
}

inline libtorch::EngineOptions quiet() {
  return {.log_level = LogLevel::kOff};
}

inline Tensor batch(int rank, int step, torch::Dtype dtype = torch::kFloat64) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step * 16 + rank));
  return torch::randn({3, 5}, generator, dtype);
}

/// A model in its engine on one rank.
struct Trainee {
  Trainee(const NetOptions& options, const Config& config, const World& world,
          libtorch::EngineOptions engine_options = quiet())
      : model(options), engine(model, config, world, std::move(engine_options)), rank(world.rank()) {
    at::set_num_threads(1);
  }
  Tensor loss(int step) { return engine.forward(batch(rank, step)); }
  StepResult train(int step) {
    engine.backward(loss(step));
    return engine.step();
  }
  /// Parameters as they are now, by name.
  std::map<std::string, std::vector<std::byte>> values() {
    std::map<std::string, std::vector<std::byte>> result;
    const ModelLayout& layout = engine.core().layout();
    for (std::size_t index = 0; index < layout.flats.size(); ++index) {
      const FlatLayout& flat = layout.flats[index];
      const auto element = static_cast<std::int64_t>(size_of(flat.dtype));
      std::vector<std::byte> whole(flat.bytes());
      engine.core().read_flat(static_cast<int>(index), whole.data());
      for (const Segment& segment : flat.segments) {
        const auto begin = whole.begin() + segment.offset * element;
        result[layout.params[static_cast<std::size_t>(segment.param)].name].assign(begin,
                                                                                   begin + segment.numel * element);
      }
    }
    engine.core().barrier();
    return result;
  }

  Net model;
  libtorch::Engine<NetImpl> engine;
  int rank;
};

using Values = std::map<std::string, std::vector<std::byte>>;

/// Runs body(rank's World) -> Values on so many ranks at a stage; all ranks must return the same.
inline Values values_at_stage(int ranks, const std::function<Values(const World& world)>& body) {
  std::vector<Values> all(static_cast<std::size_t>(ranks));
  run_world(ranks, [&](const World& world) { all[static_cast<std::size_t>(world.rank())] = body(world); });
  for (const Values& values : all) require(values == all[0], "ranks hold different parameters");
  return all[0];
}

}  // namespace zeroth::test
