#include "libtorch/gradient_level.h"

#include "libtorch/engine_hook.h"
#include "libtorch/loss_scale.h"
#include "libtorch/runtime.h"
#include "libtorch/torch_versions.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

namespace zeroth::libtorch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

double scale_inside(const Runtime* engine) {
  return engine == nullptr ? GradientLevel::scale_outside() : engine->scale_inside();
}

/// The engine in whose forward the node was made, the innermost one that scales its loss; null outside.
const NodeOwners::Owner* innermost(const NodeOwners::Owners& owners) {
  for (auto owner = owners.list.rbegin(); owner != owners.list.rend(); ++owner) {
    if (owner->runtime->scales_loss() && !owner->use->reads) return &*owner;
  }
  return nullptr;
}

/// `engine`: in whose forward the gradient is; null: outside.
variable_list at_level(variable_list grads, double factor, const std::shared_ptr<Runtime>& engine) {
  if (engine && GradientLevel::is_inside(*engine)) return grads;
  if (engine) {
    grads[0] = LossScale::leave(grads[0], factor, engine);
  } else if (factor != 1.0) {
    grads[0] = grads[0] * factor;
  }
  return grads;
}

/// A gradient of a parameter that torch.autograd.grad() returns: nobody else is going to divide it.
class CaptureLevel final : public EngineHook {
 public:
  CaptureLevel(std::weak_ptr<Runtime> engine, const at::Tensor& parameter)
      : engine_(std::move(engine)), parameter_(parameter.getIntrusivePtr()) {}

  variable_list operator()(const variable_list& grads) override {
    const auto engine = engine_.lock();
    if (!engine || grads.empty() || !grads[0].defined() || !is_captured()) return grads;
    return at_level(grads, GradientLevel::scale_outside() / engine->scale_inside(), engine);
  }

 private:
  [[nodiscard]] bool is_captured() const {
    const auto parameter = parameter_.lock();
    if (!parameter) return false;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(at::Tensor(parameter));
    const auto* const infos = torch::autograd::get_current_graph_task_exec_info();
    if (!accumulator || infos == nullptr) return false;
    const auto info = infos->find(&*accumulator);
    return info != infos->end() && info->second.captures_ != nullptr;
  }

  std::weak_ptr<Runtime> engine_;
  c10::weak_intrusive_ptr<at::TensorImpl> parameter_;
};

/// Brings the gradient of a leaf to the leaf's level, from the one that the nodes before it had.
class LeafLevel final : public EngineHook {
 public:
  variable_list operator()(const variable_list& grads) override {
    if (task_ != torch::autograd::get_current_graph_task_id() || grads.empty() || !grads[0].defined()) return grads;
    return at_level(grads, to_ / from_, engine_.lock());
  }

  /// A node at the level `from` leads to the leaf in this backward. `engine`: in whose forward it was made, or null. If
  /// another one has another level, returns the engine that one of them is of.
  [[nodiscard]] std::shared_ptr<Runtime> meet(int task, double from, double to,
                                              const std::shared_ptr<Runtime>& engine) {
    if (task_ == task && from_ != from) return engine ? engine : engine_.lock();
    task_ = task;
    from_ = from;
    to_ = to;
    engine_ = engine;
    return nullptr;
  }

 private:
  int task_ = -1;
  double from_ = 1, to_ = 1;
  std::weak_ptr<Runtime> engine_;  // in whose forward the node was made
};

LeafLevel& level_of(const at::Tensor& leaf) {
  for (const auto& hook : torch::autograd::impl::hooks(leaf)) {
    if (auto* ours = dynamic_cast<LeafLevel*>(hook.get())) return *ours;
  }
  auto hook = std::make_unique<LeafLevel>();
  LeafLevel& ours = *hook;
  torch::autograd::impl::add_hook(leaf, std::move(hook));
  return ours;
}

/// Looks at the edges of one node.
class Edges {
 public:
  Edges(const Node& node, const NodeOwners::Owners& owners, const std::vector<std::shared_ptr<Runtime>>& engines)
      : node_(node), engines_(engines) {
    const auto* const crossing = LossScale::crossing(node);
    const NodeOwners::Owner* const owner = innermost(owners);
    if (crossing != nullptr) {
      from_ = crossing->enters ? crossing->engine.lock() : crossing->around.lock();
    } else if (owner != nullptr) {
      from_ = owner->runtime;
    }
    scale_ = scale_inside(from_.get());
  }

  void look(bool scales_differ) const {
    for (const Edge& edge : node_.next_edges()) {
      if (!edge.function) continue;
      if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get())) {
        look_at_leaf(leaf->variable);
      } else if (scales_differ) {
        look_at_node(*edge.function);
      }
    }
  }

 private:
  void look_at_leaf(const at::Tensor& leaf) const {
    double to = GradientLevel::scale_of_free_leaves();
    for (const auto& engine : engines_) {
      if (!engine->is_parameter(leaf)) continue;
      to = engine->scale_inside();
      if (!engine->scales_loss()) break;
      if (scale_ != to) engine->refuse_entry(engine->name_of_parameter(leaf));
      return;
    }
    const int task = torch::autograd::get_current_graph_task_id();
    if (const auto engine = level_of(leaf).meet(task, scale_, to, from_)) engine->refuse_both_levels(leaf);
  }

  void look_at_node(const Node& next) const {
    std::shared_ptr<Runtime> into;
    if (const auto* const crossing = LossScale::crossing(next)) {
      into = crossing->enters ? crossing->around.lock() : crossing->engine.lock();
    } else if (const auto owners = NodeOwners::instance().owners(next.thread_id(), next.sequence_nr());
               const NodeOwners::Owner* const owner = innermost(owners)) {
      into = owner->runtime;
    }
    if (scale_inside(into.get()) == scale_) return;
    if (from_) {
      from_->refuse_exit(next.name());
    } else {
      into->refuse_entry("");
    }
  }

  const Node& node_;
  const std::vector<std::shared_ptr<Runtime>>& engines_;
  std::shared_ptr<Runtime> from_{};  ///< in whose forward the gradients of the node's edges are; null: outside
  double scale_ = 1;                 ///< of these
};

}  // namespace

GradientLevel::GradientLevel(double scale, bool frees_leaves, std::weak_ptr<Runtime> engine)
    : scale_(scale), frees_leaves_(frees_leaves), engine_(std::move(engine)) {}

std::shared_ptr<GradientLevel> GradientLevel::inside(const std::shared_ptr<Runtime>& engine) {
  return std::shared_ptr<GradientLevel>(new GradientLevel(engine->scale_inside(), /*frees_leaves=*/false, engine));
}

std::shared_ptr<GradientLevel> GradientLevel::of_backward(const Runtime& engine, bool frees_leaves) {
  return std::shared_ptr<GradientLevel>(new GradientLevel(engine.scale_inside(), frees_leaves, {}));
}

GradientLevel* GradientLevel::current() {
  auto* level = static_cast<GradientLevel*>(c10::ThreadLocalDebugInfo::get(own_debug_info()));
  while (level != nullptr && level->over_) level = level->around_.get();
  return level;
}

std::weak_ptr<Runtime> GradientLevel::engine_around(const Runtime& other) {
  for (const GradientLevel* level = current(); level != nullptr; level = level->around_.get()) {
    if (level->over_) continue;
    const auto engine = level->engine_.lock();
    if (!engine) return {};
    if (engine.get() != &other) return engine;
  }
  return {};
}

bool GradientLevel::is_inside(const Runtime& engine) {
  const GradientLevel* const level = current();
  return level != nullptr && level->engine_.lock().get() == &engine;
}

double GradientLevel::scale_outside() {
  const GradientLevel* const level = current();
  return level == nullptr ? 1.0 : level->scale_;
}

double GradientLevel::scale_of_free_leaves() {
  GradientLevel* const level = current();
  if (level == nullptr) return 1.0;
  int task = -1;
  const int now = torch::autograd::get_current_graph_task_id();
  const bool is_first = level->task_.compare_exchange_strong(task, now) || task == now;
  return level->frees_leaves_ && is_first ? 1.0 : level->scale_;
}

LevelScope::LevelScope(std::shared_ptr<GradientLevel> level)
    : level_(std::move(level)), before_(c10::ThreadLocalDebugInfo::current()) {
  if (auto* around = GradientLevel::current()) level_->around_ = around->shared_from_this();
  c10::ThreadLocalDebugInfo::_push(own_debug_info(), level_);
  own_ = c10::ThreadLocalDebugInfo::current();
}

LevelScope::~LevelScope() {
  level_->over_ = true;  // a profiler that began meanwhile lies above it
  if (c10::ThreadLocalDebugInfo::current() == own_) c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(before_);
}

void level_captures(const at::Tensor& parameter, const std::shared_ptr<Runtime>& engine) {
  torch::autograd::impl::add_hook(parameter, std::make_unique<CaptureLevel>(engine, parameter));
}

std::shared_ptr<GradientLevel> look_at_edges(const Node& node, const NodeOwners::Owners& owners) {
  const std::vector<std::shared_ptr<Runtime>> engines = NodeOwners::instance().engines();
  const double outside = GradientLevel::scale_outside();
  (void)GradientLevel::scale_of_free_leaves();  // the first backward at this level is this one, or one around it
  const bool scales_differ = std::ranges::any_of(engines, [&](const auto& engine) {
    return engine->scales_loss() && engine->is_own_process() && engine->scale_inside() != outside;
  });
  if (!scales_differ && outside == 1.0) return nullptr;
  Edges(node, owners, engines).look(scales_differ);
  if (!scales_differ || LossScale::crossing(node) != nullptr) return nullptr;
  const NodeOwners::Owner* const owner = innermost(owners);
  if (owner == nullptr || owner->runtime->scale_inside() == outside) return nullptr;
  if (!owner->runtime->in_backward() && !owner->runtime->was_entered()) owner->runtime->refuse_entry("");
  return GradientLevel::inside(owner->runtime);
}

}  // namespace zeroth::libtorch
