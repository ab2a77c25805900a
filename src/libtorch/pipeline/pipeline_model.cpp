#include "libtorch/pipeline/layer_list.h"

#include <zeroth/libtorch/pipeline_model.h>
#include <zeroth/libtorch/tensor_parallel.h>
#include <zeroth/program/cut.h>

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <set>

namespace zeroth::libtorch {
namespace {

constexpr const char* kLayersWhere = "libtorch.pipeline";

using Identities = std::set<const at::TensorImpl*>;

/// Tables of rows that a layer looks up.
Identities tables_of(const Layer& layer) {
  Identities tables;
  const auto look = [&](const torch::nn::Module& module) {
    if (const auto* plain = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module))
      tables.insert(plain->weight.unsafeGetTensorImpl());
    if (const auto* shared = dynamic_cast<const VocabEmbeddingImpl*>(&module))
      tables.insert(shared->weight.unsafeGetTensorImpl());
  };
  for (const auto& module : layer.modules) {
    for (const auto& one : module->modules(/*include_self=*/true)) look(*one);
  }
  return tables;
}

std::vector<double> costs_of(const std::vector<Layer>& layers, std::string_view split) {
  std::vector<double> costs;
  Identities used;  // by the layers before
  for (const Layer& layer : layers) {
    const Identities tables = split == "balanced" ? tables_of(layer) : Identities();
    double cost = 0;
    for (const at::Tensor& parameter : parameters_of(layer)) {
      const at::TensorImpl* const identity = parameter.unsafeGetTensorImpl();
      const bool looked_up = tables.contains(identity) && !used.contains(identity);
      used.insert(identity);
      if (!looked_up) cost += static_cast<double>(parameter.numel());
    }
    costs.push_back(split == "uniform" ? 1.0 : layer.cost.value_or(cost));
  }
  return costs;
}

}  // namespace

Tensors parameters_of(const Layer& layer) {
  Tensors found;
  Identities known;
  const auto add = [&](const at::Tensor& parameter) {
    if (parameter.defined() && known.insert(parameter.unsafeGetTensorImpl()).second) found.push_back(parameter);
  };
  for (const auto& module : layer.modules) std::ranges::for_each(module->parameters(/*recurse=*/true), add);
  std::ranges::for_each(layer.parameters, add);
  return found;
}

void require_layers(const std::vector<Layer>& layers) {
  ZR_CHECK(!layers.empty(), ErrorCode::kUsage, "a pipeline of no layers", {.where = kLayersWhere});
  for (std::size_t number = 0; number < layers.size(); ++number) {
    const Layer& layer = layers[number];
    const bool whole = layer.forward && std::ranges::none_of(layer.modules, [](const auto& one) { return !one; });
    ZR_CHECK(whole, ErrorCode::kUsage, "a layer is not whole",
             {.where = kLayersWhere,
              .which = "layer " + std::to_string(number) + ", " + layer.name,
              .expected = "a forward, and modules that are there"});
  }
}

std::vector<int> cut(const std::vector<Layer>& layers, int chunks, std::string_view split) {
  require_layers(layers);
  ZR_CHECK(split == "balanced" || split == "parameters" || split == "uniform", ErrorCode::kUsage,
           "there is no such way to cut layers",
           {.where = kLayersWhere,
            .which = "split",
            .expected = "balanced, parameters or uniform",
            .got = std::string(split),
            .hint = "Layer::cost says what a layer costs, for example measured seconds"});
  return cut_layers(costs_of(layers, split), chunks);
}

}  // namespace zeroth::libtorch
