// ChunkGraph: the graph of autograd of one chunk's forward on one micro-batch, until its backward has run.
//
// It holds the edges of the outputs, not the outputs: what was sent need not stay.
//
// [Note: Backward in two parts] The node of a product (linear, convolution, embedding) computes the gradients that are
// asked for alone. So I runs the graph for the gradients of the inputs, keeps the gradient that arrives at each such
// node, and W runs these nodes again for their weights. No module is changed. Gradients of all other parameters (norms,
// biases of other operations, what functions of the user's own have) are computed by I, kept, and given to the engine
// by W. So are those of a product with hooks of the user's own, on its node or its output: a hook is called once a
// backward. The engine sees each parameter of a chunk in one backward, and in the order of a whole backward: unit after
// unit. Ref: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", for the split; that it can be had from the graph is
// the idea of torch.distributed.pipelining.
#pragma once

#include "libtorch/gradient_widths.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace zeroth::libtorch {

class ChunkGraph {
 public:
  ChunkGraph() = default;
  /// `inputs`: the tensors of the chunk's input, leaves where they have gradients. `outputs`: of its forward.
  ChunkGraph(std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& outputs);

  /// For each output whether it has a gradient.
  [[nodiscard]] const std::vector<bool>& wants() const { return wants_; }
  /// Of this graph alone, before its backward: graphs of other micro-batches have the same accumulators.
  [[nodiscard]] GradientUses uses() const;
  /// `gradients`: one an output, undefined where there is none. Runs all of the graph and forgets it.
  void backward(const std::vector<at::Tensor>& gradients);
  /// The part that gives the gradients of the inputs.
  void backward_inputs(const std::vector<at::Tensor>& gradients);
  /// The rest, after it. Forgets the graph.
  void backward_weights();
  /// Gradients of the inputs, after backward() or backward_inputs(): one an input, undefined where it has none.
  [[nodiscard]] std::vector<at::Tensor> take_input_gradients();

  [[nodiscard]] std::uint64_t deferred() const { return deferred_; }  ///< parameters whose gradients W computed
  [[nodiscard]] std::uint64_t whole() const { return whole_; }        ///< that I computed

 private:
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  void keep_late_alone(const torch::autograd::edge_list& roots,
                       const std::unordered_set<const torch::autograd::Node*>& of_inputs);
  /// Fills late_edges_, and puts a Handover before each parameter that W does not compute.
  void find_late(torch::autograd::edge_list& roots, const std::unordered_set<const torch::autograd::Node*>& of_inputs);
  [[nodiscard]] Roots roots_for(const std::vector<at::Tensor>& gradients) const;

  std::vector<at::Tensor> inputs_;
  torch::autograd::edge_list outputs_;  ///< one an output that has a gradient
  std::vector<bool> wants_;
  std::vector<at::Tensor> input_gradients_;
  // Of W.
  torch::autograd::edge_list late_edges_;
  std::vector<at::Tensor> late_gradients_;
  std::uint64_t deferred_ = 0;
  std::uint64_t whole_ = 0;
};

}  // namespace zeroth::libtorch
