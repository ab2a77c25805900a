// LossScale: where the loss scale of float16 enters autograd's graphs, and where it leaves them.
//
// A node behind each output of a forward (of the outermost unit) takes gradients from the level of the code around to
// the one inside, and a node before each input that wants a gradient takes them back, see [Note: Levels of gradients].
// In place of an input that is a leaf the forward takes another tensor of the same memory: a leaf that had a node would
// be saved by operators as no leaf, and torch refuses such a one later. Inside engine.gathered() parameters have a node
// of their own.
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

  /// At the beginning of the outermost forward: what is computed from the result gives `input` gradients without the
  /// scale. The result is `input` itself; in place of a leaf, a tensor of the same memory.
  [[nodiscard]] at::Tensor open_input(const at::Tensor& input);
  void close_inputs() noexcept;
  /// Throws kModel if the forward has written to a leaf, which torch does not allow.
  void require_unwritten_leaves() const;

  /// Uses of these leaves have the scale until drop(), but for those between suspend() and resume().
  void give(const std::vector<at::Tensor>& parameters);
  void drop(const std::vector<at::Tensor>& parameters) noexcept;
  void suspend() noexcept;
  void resume() noexcept;

  /// What a node of this class does with the level of gradients.
  struct Crossing {
    std::weak_ptr<Runtime> engine;
    std::weak_ptr<Runtime> around;  ///< the engine in whose forward those of `engine` are; null: outside of any
    bool enters = true;             ///< the forwards of `engine`; or leaves them
  };
  /// Null for a node that is none of this class.
  [[nodiscard]] static const Crossing* crossing(const torch::autograd::Node& node);
  /// A node through which gradients enter a forward.
  [[nodiscard]] static bool is_entry(const torch::autograd::Node& node);
  /// `gradient` times `factor`, taken out of the forwards of `engine`; a derivative of it enters them again.
  [[nodiscard]] static at::Tensor leave(const at::Tensor& gradient, double factor,
                                        const std::shared_ptr<Runtime>& engine);

 private:
  /// A tensor whose gradient goes through a node of ours for a while.
  struct Detour {
    at::Tensor tensor;
    torch::autograd::Edge own;  ///< to return to
    torch::autograd::Edge through;
    bool was_leaf;
  };
  [[nodiscard]] Crossing crossing_now(bool enters) const;
  [[nodiscard]] Detour detour_of(const at::Tensor& tensor, bool enters) const;
  static void take(const Detour& detour);
  static void leave(const Detour& detour) noexcept;

  std::weak_ptr<Runtime> runtime_;
  std::vector<Detour> inputs_;
  /// A leaf, and what forwards take in its place.
  struct Stand {
    at::Tensor leaf, alias;
    std::uint32_t version = 0;
  };
  std::vector<Stand> leaves_;
  std::vector<Detour> given_;
};

}  // namespace zeroth::libtorch
