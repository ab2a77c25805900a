#include "libtorch/pipeline/layer_list.h"

#include <zeroth/libtorch/collectives.h>
#include <zeroth/libtorch/pipeline_model.h>
#include <zeroth/libtorch/tensor_parallel.h>
#include <zeroth/program/cut.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

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
    costs.push_back(layer.cost.value_or(cost));
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

at::Tensor targets_of(const std::string& name, const MicroBatch& batch, std::int64_t rows) {
  const bool any = !batch.targets.empty() && batch.targets[0].defined();
  const bool fits = any && batch.targets[0].scalar_type() == at::kLong && batch.targets[0].numel() == rows;
  ZR_CHECK(fits, ErrorCode::kModel, "the targets of a micro-batch do not fit the head's input",
           {.where = kLayersWhere,
            .which = "layer " + name + ", MicroBatch::targets[0]",
            .expected = "int64, " + std::to_string(rows) + " of them",
            .got = any ? batch.targets[0].toString() + " " + c10::str(batch.targets[0].sizes()) : "no tensor"});
  return batch.targets[0].flatten();
}

double targets_that_count(const CrossEntropyHead& head, const at::Tensor& targets) {
  const at::NoGradGuard no_grad;
  const at::Tensor own = targets.ne(head.ignore_index).sum().to(at::kDouble).cpu();
  return (head.sequence ? all_reduce(own, *head.sequence) : own).item<double>();
}

Tensors end_of_head(const std::string& name, const CrossEntropyHead& head, const at::Tensor& logits,
                    const MicroBatch& batch) {
  if (batch.targets.empty()) return {logits};
  at::Tensor rows = logits.reshape({-1, logits.size(-1)});
  if (rows.element_size() == 2) rows = rows.to(at::kFloat);  // 16 bits are too few for a sum over the classes
  const at::Tensor targets = targets_of(name, batch, rows.size(0)).to(rows.device());
  const auto entropy = [&](at::Reduction::Reduction reduction) {
    return at::cross_entropy_loss(rows, targets, {}, reduction, head.ignore_index);
  };
  if (!head.sequence) return {entropy(at::Reduction::Mean)};
  return {reduce_from_group(entropy(at::Reduction::Sum) / targets_that_count(head, targets), *head.sequence)};
}

Layer cross_entropy_head(std::string name, Unit<torch::nn::Linear> head, std::int64_t ignore_index,
                         std::optional<RankGroup> sequence) {
  auto& linear = *head->inner();
  const CrossEntropyHead own{
      .weight = linear.weight, .bias = linear.bias, .ignore_index = ignore_index, .sequence = std::move(sequence)};
  Layer made{.name = name, .modules = {head.ptr()}, .head = own};
  made.forward = [name, head, own](const Tensors& values, const MicroBatch& batch) mutable {
    detail::require_values(name, "1", values.size() == 1, values.size());
    return end_of_head(name, own, head->forward(values[0]), batch);
  };
  return made;
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
  if (split == "uniform") return cut_evenly(static_cast<int>(layers.size()), chunks);
  return cut_layers(costs_of(layers, split), chunks);
}

}  // namespace zeroth::libtorch
