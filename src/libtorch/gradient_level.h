// GradientLevel: the factor that gradients have outside of the forwards of fp16 engines.
//
// [Note: Levels of gradients] Gradients inside a forward of an engine E have its loss scale S(E). Outside they have the
// level of the code that began the backward:
// - loss.backward(), torch.autograd.grad(): 1.
// - E.backward(loss): S(E), so that a loss in float32 from float16 outputs keeps small gradients.
// - code inside a forward of E, a node of it included (a checkpoint's, for one): S(E).
// Nodes of LossScale change the level where gradients enter and leave a forward. So each engine has its own scale
// inside, whichever engine began the backward, and a gradient that enters several forwards one after the other is at
// the right level in each. What is made while such a node runs (create_graph) changes the level back, so derivatives
// of any order are right.
// A leaf has a level of its own: S(E) for a parameter of E, 1 for others; inside a backward that another node began
// (a reentrant checkpoint), a leaf that belongs to no engine continues at the level of that node. LeafLevel brings a
// gradient there.
// An edge that leads from one level to another in any other way is an error: look_at_edges() sees it before the node
// runs.
// Torch carries the level of the code that began a backward to the threads of that backward.
#pragma once

#include "libtorch/node_owners.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <utility>

namespace zeroth::libtorch {

class Runtime;

/// Immutable but for `task` and `over`.
class GradientLevel final : public c10::DebugInfoBase, public std::enable_shared_from_this<GradientLevel> {
 public:
  /// Of code inside a forward of `engine`, or of a node of one.
  [[nodiscard]] static std::shared_ptr<GradientLevel> inside(const std::shared_ptr<Runtime>& engine);
  /// Of a backward that begins with the scale of `engine`. `frees_leaves`: leaves that belong to no engine get
  /// gradients without it.
  [[nodiscard]] static std::shared_ptr<GradientLevel> of_backward(const Runtime& engine, bool frees_leaves);

  /// The engine in whose forward the code that runs is: null outside. Not `other`.
  [[nodiscard]] static std::weak_ptr<Runtime> engine_around(const Runtime& other);
  /// The code that runs, or that began the backward which runs, is inside a forward of `engine`.
  [[nodiscard]] static bool is_inside(const Runtime& engine);
  /// Of the code that runs; in a backward, of the code that began it.
  [[nodiscard]] static double scale_outside();
  /// What the gradient of a leaf that belongs to no engine is to have, in the backward that runs.
  [[nodiscard]] static double scale_of_free_leaves();

 private:
  friend class LevelScope;
  GradientLevel(double scale, bool frees_leaves, std::weak_ptr<Runtime> engine);
  [[nodiscard]] static GradientLevel* current();

  double scale_;
  bool frees_leaves_;
  std::weak_ptr<Runtime> engine_;          ///< of code inside its forward
  std::shared_ptr<GradientLevel> around_;  ///< of the code around
  std::atomic<int> task_{-1};              ///< the backward that began at this level; others began inside it
  std::atomic<bool> over_{false};          ///< but somebody's own value lies above it in torch's list
};

/// While it lives, this thread's code has that level. Scopes of a thread end in reverse order.
class LevelScope {
 public:
  explicit LevelScope(std::shared_ptr<GradientLevel> level);
  LevelScope(const LevelScope&) = delete;
  LevelScope& operator=(const LevelScope&) = delete;
  ~LevelScope();

 private:
  std::shared_ptr<GradientLevel> level_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_, own_;
};

/// Adds a hook to a parameter of an engine that scales its loss: torch.autograd.grad() gives its gradient at the level
/// of the caller.
void level_captures(const at::Tensor& parameter, const std::shared_ptr<Runtime>& engine);

/// Before `node` runs, made in the forwards of `owners`: tells an engine of an edge of the node that leads to another
/// level, and sets the levels of leaves. Returns the level of code that runs inside of the node if that is not the one
/// that torch has; else null.
[[nodiscard]] std::shared_ptr<GradientLevel> look_at_edges(const torch::autograd::Node& node,
                                                           const NodeOwners::Owners& owners);

}  // namespace zeroth::libtorch
