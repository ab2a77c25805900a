// LossScale: where the loss scale of float16 enters autograd's graphs, and where it leaves them.
//
// [Note: Where the scale is] Gradients inside the engine's modules have the scale: parameters' gradients, which the
// update divides by it. Outside they have not.
// - engine.backward(loss) begins with the scale: all of the graph has it, what lies outside the modules included.
// - A plain loss.backward() begins without it. So a node behind each output of a forward (of the outermost unit)
//   multiplies, and one before each input that wants a gradient divides, in both kinds of backward. What gets into the
//   modules another way (a parameter used outside of them, a tensor that left a forward beside its outputs) would lack
//   the scale: NodeOwners sees such edges, and the backward throws. Inside engine.gathered() parameters have a node
//   that multiplies of their own.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace zeroth::libtorch {

class Runtime;

class LossScale {
 public:
  /// `runtime`: asked for the scale when nodes run.
  explicit LossScale(std::weak_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  /// Ends the outermost forward: gradients of these outputs get the scale. `first_node`: outputs that were made before
  /// this node are none of the forward's. Throws kModel for an output that is a parameter itself.
  void scale_outputs(const std::vector<at::Tensor>& outputs, std::uint64_t first_node) const;

  /// Begins the outermost forward: what is computed from these tensors gives them gradients without the scale.
  void open_inputs(const std::vector<at::Tensor>& inputs);
  void close_inputs() noexcept;

  /// Uses of these leaves have the scale until drop(), but for those between suspend() and resume().
  void give(const std::vector<at::Tensor>& parameters);
  void drop(const std::vector<at::Tensor>& parameters) noexcept;
  void suspend() noexcept;
  void resume() noexcept;

  /// A node through which gradients enter a module with the scale.
  [[nodiscard]] static bool is_entry(const torch::autograd::Node& node);

 private:
  /// A tensor whose gradient goes through a node of ours for a while.
  struct Detour {
    at::Tensor tensor;
    torch::autograd::Edge own;  ///< to return to
    torch::autograd::Edge through;
    bool was_leaf;
  };
  [[nodiscard]] Detour detour_of(const at::Tensor& tensor, bool divides) const;
  static void take(const Detour& detour);
  static void leave(const Detour& detour) noexcept;

  std::weak_ptr<Runtime> runtime_;
  std::vector<Detour> inputs_;
  std::vector<Detour> given_;
};

}  // namespace zeroth::libtorch
