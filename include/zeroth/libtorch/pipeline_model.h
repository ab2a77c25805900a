// A model as a list of layers, for the stages of a pipeline: layers in a row, a chunk is a run of them.
//
//   std::vector<Layer> layers{layer("embedding", net->embedding)};
//   for (auto& block : net->blocks) layers.push_back(layer("block", block));
//   layers.push_back({.name = "loss",
//                     .forward = [head = net->head](const Tensors& h, const MicroBatch& batch) mutable -> Tensors {
//                       return {torch::mse_loss(head(h[0]), batch.targets[0])};
//                     },
//                     .modules = {net->head.ptr()}});
//
// A language model ends with cross_entropy_head("head", net->head) instead: a head of which all stages may have rows.
//
// Which parameters a layer uses is what its modules hold, and what it lists beside them. A parameter of several layers
// is a tied weight: the stages of all of them have it, and its gradients are summed once.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/libtorch/rank_group.h>
#include <zeroth/libtorch/unit.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Linear;
}  // namespace torch::nn

namespace zeroth::libtorch {

using Tensors = std::vector<at::Tensor>;

/// What a pipeline trains on at a time. All stages of a pipeline get the same ones.
struct MicroBatch {
  Tensors inputs{};   ///< the first layer's values
  Tensors targets{};  ///< what layers read beside their values: labels, masks, weights
};

/// Returns the values of the next layer: any number of tensors of any shapes, which may change from micro-batch to
/// micro-batch. Floating ones may have gradients; an undefined one arrives undefined. They must not be written to any
/// more. The last layer of the model returns the loss, one element, as its first tensor.
using LayerForward = std::function<Tensors(const Tensors& values, const MicroBatch& batch)>;

/// What cross_entropy_head() says of its layer, so that stages can share it.
struct CrossEntropyHead {
  at::Tensor weight{};  ///< [classes, features]
  at::Tensor bias{};    ///< [classes], or undefined
  std::int64_t ignore_index = -100;
  std::optional<RankGroup> sequence{};
};

struct Layer {
  std::string name{};  ///< for messages
  LayerForward forward{};
  std::vector<std::shared_ptr<torch::nn::Module>> modules{};  ///< whose parameters the layer uses
  Tensors parameters{};                                       ///< that it uses beside those
  /// Of the layer when layers are cut into chunks, in the unit of parameters; unset: its parameters.
  std::optional<double> cost{};
  /// Only of the last layer: see cross_entropy_head().
  std::optional<CrossEntropyHead> head{};
};

namespace detail {

inline constexpr std::size_t kMostValues = 8;  ///< that a layer of a module takes

/// The module's forward takes so many tensors.
template <class Impl, class Indices>
inline constexpr bool kTakesTensors = false;
template <class Impl, std::size_t... At>
inline constexpr bool kTakesTensors<Impl, std::index_sequence<At...>> =
    requires(Impl& impl, const at::Tensor& value) { impl.forward((static_cast<void>(At), value)...); };

/// Throws kModel with the layer's name. `expected`: the numbers that it takes.
inline void require_values(const std::string& name, const std::string& expected, bool taken, std::size_t got) {
  ZR_CHECK(taken, ErrorCode::kModel, "a layer takes another number of tensors than it is given",
           {.where = "libtorch.pipeline",
            .which = "layer " + name,
            .expected = expected,
            .got = std::to_string(got),
            .hint = "the first layer gets MicroBatch::inputs, any other what the layer before it returns"});
}

}  // namespace detail

/// A layer of one module (a TORCH_MODULE holder, or a Unit of one), whose forward takes the values, one argument each,
/// and returns a tensor, or a pair, a tuple or a vector of tensors. At most 8 values; arguments with defaults need not
/// be there.
template <class Holder>
[[nodiscard]] Layer layer(std::string name, Holder module) {
  using Impl = typename Holder::ContainedType;
  constexpr auto takes = []<std::size_t... Count>(std::index_sequence<Count...>) {
    return std::array{detail::kTakesTensors<Impl, std::make_index_sequence<Count>>...};
  }(std::make_index_sequence<detail::kMostValues + 1>());
  static_assert(std::ranges::find(takes, true) != takes.end(), "the forward of a layer's module takes tensors");
  Layer made{.name = name, .modules = {module.ptr()}};
  made.forward = [name, module, takes](const Tensors& values, const MicroBatch&) mutable {
    std::string expected;
    for (std::size_t count = 0; count < takes.size(); ++count) {
      if (takes[count]) expected += (expected.empty() ? "" : " or ") + std::to_string(count);
    }
    detail::require_values(name, expected, values.size() < takes.size() && takes[values.size()], values.size());
    Tensors results;
    const auto call = [&]<std::size_t... At>(std::index_sequence<At...>) {
      if constexpr (detail::kTakesTensors<Impl, std::index_sequence<At...>>) {
        if (sizeof...(At) == values.size()) collect_tensors(module->forward(values[At]...), results);
      }
    };
    [&]<std::size_t... Count>(std::index_sequence<Count...>) {
      (call(std::make_index_sequence<Count>()), ...);
    }(std::make_index_sequence<detail::kMostValues + 1>());
    return results;
  };
  return made;
}

/// The last layer of a language model: a linear head, and the mean cross entropy of its output with
/// MicroBatch::targets[0], int64, as many as the value, [..., features], has rows; targets of `ignore_index` do not
/// count. Of 16-bit logits the loss is computed in float32. Without targets it returns the logits. `sequence`: ranks
/// with other rows of the same sample and their targets, those of the axis sp; the mean is over the rows of all. With
/// zeroth.pipeline.vocabulary other than "whole" every stage has rows of the matrix, and no rank has all logits.
[[nodiscard]] Layer cross_entropy_head(std::string name, Unit<torch::nn::Linear> head, std::int64_t ignore_index = -100,
                                       std::optional<RankGroup> sequence = std::nullopt);

/// The modules of a torch::nn::Sequential, each a layer that takes one tensor and returns one.
template <class Sequential>
[[nodiscard]] std::vector<Layer> layers_of(const Sequential& modules) {
  std::vector<Layer> layers;
  const std::vector<std::string> names = modules->named_children().keys();
  for (auto& module : *modules) {
    Layer made{.name = names[layers.size()], .modules = {module.ptr()}};
    made.forward = [name = made.name, module = module](const Tensors& values, const MicroBatch&) mutable -> Tensors {
      detail::require_values(name, "1", values.size() == 1, values.size());
      return {module.forward(values[0])};
    };
    layers.push_back(std::move(made));
  }
  return layers;
}

/// Bounds of so many chunks: chunk c has the layers result[c] to result[c + 1] - 1, at least one. `split`, as
/// zeroth.pipeline.split: "parameters", the largest sum of a chunk's parameters is as small as it can be, see
/// cut_layers(), and a tied weight counts in each of its layers; "balanced", the same without the tables of
/// torch::nn::Embedding and VocabEmbedding in the layer that uses them first, for to look up rows takes no time;
/// "uniform", equal numbers of layers, see cut_evenly(). Layer::cost replaces what a layer costs, not with "uniform".
/// Local, and the same on all ranks for the same layers, before parameters have been given away. Throws kUsage for
/// fewer layers than chunks and another split.
[[nodiscard]] std::vector<int> cut(const std::vector<Layer>& layers, int chunks, std::string_view split = "balanced");

}  // namespace zeroth::libtorch
