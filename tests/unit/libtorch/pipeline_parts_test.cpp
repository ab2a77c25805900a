// Parts of a pipeline on one rank: backward in two parts, and descriptions of values.
#include "libtorch/pipeline/chunk_graph.h"
#include "libtorch/pipeline/stage_values.h"

#include <zeroth/base/error.h>

#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules.h>

namespace zeroth::libtorch {
namespace {

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    scale = register_parameter("scale", at::full({6}, 1.5, at::kDouble));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
    const at::Tensor mixed = x + embedding(ids);
    return (x + down(torch::nn::functional::gelu(up(norm(mixed) * scale)))) * scale;
  }
  torch::nn::Embedding embedding{9, 6};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Linear up{6, 10};
  torch::nn::Linear down{torch::nn::LinearOptions(10, 6).bias(false)};
  at::Tensor scale;
};
TORCH_MODULE(Mixed);

struct Gradients {
  at::Tensor input;
  std::vector<at::Tensor> parameters;
};

Gradients gradients_of(bool in_parts, bool input_trains, ChunkGraph* seen = nullptr) {
  torch::manual_seed(3);
  Mixed model;
  at::Tensor x = at::randn({4, 6}, at::kDouble).requires_grad_(input_trains);
  const at::Tensor ids = at::tensor({1, 3, 3, 8}, at::kLong);
  const at::Tensor y = model(x, ids);
  const at::Tensor dy = at::randn({4, 6}, at::kDouble);
  ChunkGraph graph({x}, {y});
  if (in_parts) {
    graph.backward_inputs({dy});
    Gradients found{.input = graph.take_input_gradients()[0], .parameters = {}};
    for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined()) << "before W";
    graph.backward_weights();
    for (const at::Tensor& parameter : model->parameters()) found.parameters.push_back(parameter.grad());
    if (seen != nullptr) *seen = graph;
    return found;
  }
  graph.backward({dy});
  Gradients found{.input = graph.take_input_gradients()[0], .parameters = {}};
  for (const at::Tensor& parameter : model->parameters()) found.parameters.push_back(parameter.grad());
  return found;
}

TEST(ChunkGraph, BackwardInTwoPartsHasTheBitsOfOne) {
  for (const bool input_trains : {true, false}) {
    const Gradients whole = gradients_of(false, input_trains);
    ChunkGraph graph;
    const Gradients parts = gradients_of(true, input_trains, &graph);
    EXPECT_EQ(whole.input.defined(), input_trains);
    EXPECT_EQ(parts.input.defined(), input_trains);
    EXPECT_TRUE(!input_trains || at::equal(parts.input, whole.input));
    ASSERT_EQ(parts.parameters.size(), whole.parameters.size());
    for (std::size_t at = 0; at < whole.parameters.size(); ++at) {
      ASSERT_TRUE(parts.parameters[at].defined()) << at;
      EXPECT_TRUE(at::equal(parts.parameters[at], whole.parameters[at])) << at;
    }
    EXPECT_EQ(graph.deferred(), 4U) << "weights of the embedding and the linear layers, a bias";
    EXPECT_EQ(graph.whole(), 3U) << "norm, and a scale that is used twice";
  }
}

TEST(ChunkGraph, ABiasThatAnotherOperationUsesIsCountedOnce) {
  const auto gradients = [](bool in_parts) {
    torch::manual_seed(5);
    torch::nn::Linear layer(4, 4);
    layer->to(at::kDouble);
    const at::Tensor x = at::randn({3, 4}, at::kDouble).requires_grad_();
    const at::Tensor y = layer(x) * layer->bias;
    ChunkGraph graph({x}, {y});
    const at::Tensor dy = at::randn({3, 4}, at::kDouble);
    if (in_parts) {
      graph.backward_inputs({dy});
      graph.backward_weights();
      EXPECT_EQ(graph.deferred(), 1U) << "the weight";
      EXPECT_EQ(graph.whole(), 1U) << "the bias";
    } else {
      graph.backward({dy});
    }
    return std::vector<at::Tensor>{layer->weight.grad(), layer->bias.grad()};
  };
  const std::vector<at::Tensor> whole = gradients(false);
  const std::vector<at::Tensor> parts = gradients(true);
  for (std::size_t at = 0; at < whole.size(); ++at) EXPECT_TRUE(at::equal(parts[at], whole[at])) << at;
}

/// Products of every kind, some with an input that has a gradient and some without, and a norm, with a hook on each
/// output or parameter that `hooked` names.
struct HookedImpl : torch::nn::Module {
  explicit HookedImpl(std::string hooked, int& calls) : hooked_(std::move(hooked)), calls_(&calls) {
    for (auto* linear : {&first, &last}) register_module(linear == &first ? "first" : "last", *linear);
    register_module("embedding", embedding);
    register_module("convolution", convolution);
    register_module("norm", norm);
    to(at::kDouble);
    for (const auto& parameter : named_parameters()) with_hook(parameter.key(), parameter.value());
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& features, const at::Tensor& ids) {
    const at::Tensor mixed = x + with_hook("embedding", embedding(ids)) + with_hook("first", first(features));
    const at::Tensor image = with_hook("convolution", convolution(mixed.view({1, 1, 4, 6}))).view({4, 6});
    return with_hook("last", last(with_hook("norm", norm(image))));
  }
  at::Tensor with_hook(const std::string& name, const at::Tensor& tensor) {
    if (name == hooked_) {
      tensor.register_hook([calls = calls_](const at::Tensor& gradient) {
        ++*calls;
        return gradient * 2;
      });
    }
    return tensor;
  }
  std::string hooked_;
  int* calls_;
  torch::nn::Embedding embedding{9, 6};
  torch::nn::Linear first{3, 6};
  torch::nn::Conv2d convolution{torch::nn::Conv2dOptions(1, 1, 3).padding(1)};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  torch::nn::Linear last{6, 6};
};
TORCH_MODULE(Hooked);

TEST(ChunkGraph, HooksAreCalledOnceAndCountOnce) {
  struct Found {
    std::vector<at::Tensor> gradients;
    int calls = 0;
    std::uint64_t whole = 0;
  };
  const auto find = [](const std::string& hooked, bool in_parts) {
    Found found;
    torch::manual_seed(11);
    Hooked model(hooked, found.calls);
    const at::Tensor x = at::randn({4, 6}, at::kDouble).requires_grad_();
    const at::Tensor y = model(x, at::randn({4, 3}, at::kDouble), at::tensor({1, 3, 3, 8}, at::kLong));
    const at::Tensor dy = at::randn({4, 6}, at::kDouble);
    ChunkGraph graph({x}, {y});
    if (in_parts) {
      graph.backward_inputs({dy});
      graph.backward_weights();
    } else {
      graph.backward({dy});
    }
    found.gradients = graph.take_input_gradients();
    for (const at::Tensor& parameter : model->parameters()) found.gradients.push_back(parameter.grad());
    found.whole = graph.whole();
    return found;
  };
  struct Case {
    const char* hooked;
    std::uint64_t whole;  ///< parameters that I computes, the norm's two among them
  };
  for (const Case& of :
       {Case{"", 2}, Case{"embedding", 3}, Case{"first", 4}, Case{"convolution", 4}, Case{"norm", 2}, Case{"last", 4},
        Case{"norm.weight", 2}, Case{"last.weight", 2}, Case{"first.bias", 2}, Case{"embedding.weight", 2}}) {
    const Found whole = find(of.hooked, false);
    const Found parts = find(of.hooked, true);
    EXPECT_EQ(whole.calls, of.hooked[0] == '\0' ? 0 : 1) << of.hooked;
    EXPECT_EQ(parts.calls, whole.calls) << of.hooked;
    EXPECT_EQ(parts.whole, of.whole) << of.hooked;
    ASSERT_EQ(parts.gradients.size(), whole.gradients.size());
    for (std::size_t at = 0; at < whole.gradients.size(); ++at)
      EXPECT_TRUE(at::equal(parts.gradients[at], whole.gradients[at])) << of.hooked << ", gradient " << at;
  }
}

TEST(ChunkGraph, AParameterThatIsAnOutputGetsItsGradient) {
  at::Tensor weight = at::randn({3, 3}, at::kDouble).requires_grad_();
  const at::Tensor x = at::randn({2, 3}, at::kDouble).requires_grad_();
  ChunkGraph graph({x}, {at::mm(x, weight), weight});
  graph.backward_inputs({at::ones({2, 3}, at::kDouble), at::full({3, 3}, 5.0, at::kDouble)});
  graph.backward_weights();
  EXPECT_TRUE(at::allclose(weight.grad(), x.detach().t().mm(at::ones({2, 3}, at::kDouble)) + 5.0));
}

TEST(ChunkGraph, WeightsGetTheirGradientsUnitAfterUnit) {
  constexpr int kUnits = 4;
  torch::manual_seed(7);
  const at::Tensor x = at::randn({3, 6}).requires_grad_();
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<torch::nn::Linear> layers;
  at::Tensor y = x;
  for (int unit = 0; unit < kUnits; ++unit) {
    norms.emplace_back(torch::nn::LayerNormOptions({6}));
    layers.emplace_back(6, 6);
    y = layers.back()(norms.back()(y));
  }
  ChunkGraph graph({x}, {y});
  graph.backward_inputs({at::ones_like(y)});
  std::vector<int> order;  // the unit of each gradient
  for (int unit = 0; unit < kUnits; ++unit) {
    for (const at::Tensor& parameter : {norms[unit]->weight, norms[unit]->bias, layers[unit]->weight})
      parameter.register_hook([&order, unit](const at::Tensor&) { order.push_back(unit); });
  }
  graph.backward_weights();
  EXPECT_EQ(order, (std::vector<int>{3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0}));
}

TEST(StageValues, FormsComeBack) {
  const SentValues values{
      .tensors = {at::zeros({2, 3}), at::Tensor(), at::zeros({}, at::kLong), at::zeros({0, 5}, at::kBool)},
      .has_gradient = {true, false, false, false},
      .structure = "[1, 2]"};
  const SentValues again = read_form(form_of(values), "stage 0");
  ASSERT_EQ(again.tensors.size(), 4U);
  EXPECT_EQ(again.tensors[0].sizes(), values.tensors[0].sizes());
  EXPECT_FALSE(again.tensors[1].defined());
  EXPECT_EQ(again.tensors[2].scalar_type(), at::kLong);
  EXPECT_EQ(again.tensors[3].sizes(), values.tensors[3].sizes());
  EXPECT_EQ(again.has_gradient, values.has_gradient);
  EXPECT_EQ(again.structure, values.structure);
}

TEST(StageValues, DamagedFormsAreRefused) {
  const SentValues values{.tensors = {at::zeros({2, 3})}, .has_gradient = {true}, .structure = "x"};
  const std::string form = form_of(values);
  for (std::size_t length = 0; length < form.size(); ++length)
    EXPECT_THROW(static_cast<void>(read_form(form.substr(0, length), "stage 0")), Error) << length;
  EXPECT_THROW(static_cast<void>(read_form(form + "y", "stage 0")), Error);
  std::string huge = form;
  for (std::size_t at = 10; at < 18; ++at) huge[at] = '\x7f';  // the first size
  EXPECT_THROW(static_cast<void>(read_form(huge, "stage 0")), Error);
}

}  // namespace
}  // namespace zeroth::libtorch
