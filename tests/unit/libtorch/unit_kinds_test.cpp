// Modules that a Unit wraps: with default arguments, with a template for their forward, with overloads.
#include "adapter_checks.h"

#include <zeroth/libtorch/pipeline_model.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/transformerlayer.h>

namespace zeroth::test {
namespace {

using libtorch::Unit;

/// x a + b, where b is 1 if it is not given; or of two factors.
struct OverloadedImpl : torch::nn::Module {
  OverloadedImpl() { a = register_parameter("a", torch::full({1}, 2.0, torch::kFloat64)); }
  Tensor forward(const Tensor& x) { return x * a; }
  Tensor forward(const Tensor& x, double factor) { return x * a * factor; }
  Tensor a{};
};
TORCH_MODULE(Overloaded);

struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    const auto options = torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(8).dropout(0);
    encoder = register_module("encoder",
                              Unit<torch::nn::TransformerEncoderLayer>(torch::nn::TransformerEncoderLayer(options)));
    sequence = register_module("sequence", Unit<torch::nn::Sequential>(torch::nn::Sequential(
                                               torch::nn::Linear(8, 4), torch::nn::Tanh(), torch::nn::Linear(4, 8))));
    overloaded = register_module("overloaded", Unit<Overloaded>(Overloaded()));
    to(torch::kFloat64);
  }
  Tensor forward(const Tensor& x) {
    const Tensor mask = torch::zeros({3, 3}, x.options());
    const Tensor h = encoder->forward(encoder(x), mask) + encoder->forward(x, {}, {}) + encoder->forward(x, mask, {});
    return (overloaded->forward(sequence->forward(h)) + overloaded(sequence(h), 3.0)).square().mean();
  }
  Unit<torch::nn::TransformerEncoderLayer> encoder{nullptr};
  Unit<torch::nn::Sequential> sequence{nullptr};
  Unit<Overloaded> overloaded{nullptr};
};
TORCH_MODULE(Kinds);

TEST(Units, WrapModulesWithDefaultsTemplatesAndOverloads) {
  (void)expect_equal_at_all_stages(2, [](int stage, const World& world) {
    at::set_num_threads(1);
    Kinds model;
    {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : model->parameters()) parameter.fill_(0.125);
    }
    const Tensor x = torch::linspace(0, 1, 24, torch::kFloat64).view({3, 1, 8}) + world.rank();
    const double alone = model->forward(x).item<double>();
    libtorch::Engine<KindsImpl> engine(model, config_of(stage), world, quiet());
    Values values;
    for (int step = 0; step < 2; ++step) {
      const Tensor loss = engine.forward(x);
      require(step > 0 || loss.item<double>() == alone, "the plain model has another loss");
      engine.backward(loss);
      require(engine.step().committed, "a step was skipped");
    }
    for (const std::string name : {"encoder.linear1.weight", "sequence.2.bias", "overloaded.a"}) {
      const Tensor value = engine.full(name);
      const auto* bytes = static_cast<const std::byte*>(value.const_data_ptr());
      values[name].assign(bytes, bytes + value.nbytes());
    }
    return values;
  });
}

TEST(Units, OfAnyKindAreLayers) {
  Kinds model;
  const Tensor x = torch::ones({3, 1, 8}, torch::kFloat64);
  for (const libtorch::Layer& layer :
       {libtorch::layer("encoder", model->encoder), libtorch::layer("sequence", model->sequence),
        libtorch::layer("overloaded", model->overloaded)}) {
    const libtorch::Tensors results = layer.forward({x}, {});
    ASSERT_EQ(results.size(), 1U) << layer.name;
    EXPECT_EQ(results[0].sizes(), x.sizes()) << layer.name;
  }
  const std::string text =
      thrown_by([&] { (void)libtorch::layer("encoder", model->encoder).forward({x, x, x, x}, {}); });
  EXPECT_NE(text.find("layer encoder; expected: 1 or 2 or 3; got: 4"), std::string::npos) << text;
}

}  // namespace
}  // namespace zeroth::test
