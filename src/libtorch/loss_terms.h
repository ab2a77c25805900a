// LossTerms: how often the gradient of a parameter counts that all ranks compute alike, and which terms of a loss do.
#pragma once

#include <zeroth/engine/config.h>
#include <zeroth/libtorch/model_description.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace zeroth::libtorch {

/// [Note: Terms of weights alone] Gradients are summed over the ranks that share a sequence, and those of some
/// parameters (norms of heads, norms on slices) over the ranks that share matrices. A loss that goes through the model
/// gives each of them its part. A term that is computed from weights alone, past the model's forward, is whole on every
/// rank, so its gradient would count as often as there are ranks. part() divides it. The mean over ranks with batches
/// of their own divides a term of experts that only some of these ranks have, so it would count too little there.
/// plain() finds one that is added without: a node of the graph that leads to parameters of the engine, to no node of a
/// forward and to no call between ranks, and that gets to the loss by sums and scales alone. A product of weights with
/// data (F.linear(hidden, weight)) is none, for the data may be this rank's. A term that the program has divided by
/// itself looks the same, so what is found is a warning.
class LossTerms {
 public:
  /// Of a node: it was made in a forward of the engine's model.
  using OfForward = std::function<bool(const torch::autograd::Node& node)>;

  LossTerms(const ModelDescription& model, const Config& config);

  /// Whether any gradient counts several times.
  [[nodiscard]] bool any() const { return any_; }

  /// A term that every rank has whole: the same value, and for each parameter the part of its gradient that this rank
  /// owes. Throws kUsage for one that is computed from what a forward gave, where ranks share sequences.
  [[nodiscard]] at::Tensor part(const at::Tensor& term, const OfForward& of_forward) const;

  /// What to say of a term that counts several times; "": there is none.
  [[nodiscard]] std::string plain(const at::Tensor& loss, const OfForward& of_forward) const;

 private:
  struct Walk;
  void walk(Walk& walk, torch::autograd::Node* root) const;

  const ModelDescription& model_;
  int sequence_ranks_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> params_;
  std::vector<double> times_;  ///< that a gradient of a parameter counts; below 1: of experts, over ranks with batches
  bool any_ = false;
};

}  // namespace zeroth::libtorch
