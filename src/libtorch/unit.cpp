#include "libtorch/engine_hook.h"
#include "libtorch/node_owners.h"
#include "libtorch/runtime.h"
#include "libtorch/torch_versions.h"

#include <zeroth/libtorch/unit.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

namespace zeroth::libtorch {
namespace {

using torch::autograd::variable_list;

/// Tells the runtime, if that is still there, that a node behind an output is about to run. NodeOwners would tell it,
/// too, but only from here errors reach the caller of backward as they are.
class BeforeOutput final : public EngineHook {
 public:
  BeforeOutput(std::weak_ptr<Runtime> runtime, std::shared_ptr<UnitUse> use, std::uint64_t node)
      : runtime_(std::move(runtime)), use_(std::move(use)), node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { runtime->before_backward(use_, node_); });
    return grads;
  }

 private:
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<UnitUse> use_;
  std::uint64_t node_;
};

using Nodes = std::vector<NodePointer>;

/// The producers of tensors, each once, without those that were there before the node number `first` and accumulators.
Nodes producers(const std::vector<at::Tensor>& tensors, std::uint64_t first) {
  Nodes nodes;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    NodePointer node = torch::autograd::impl::gradient_edge(tensor).function;
    if (!node || node->sequence_nr() < first || node->sequence_nr() == std::numeric_limits<std::uint64_t>::max()) {
      continue;
    }
    if (std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace

struct UnitScope::State {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<UnitUse> use;
  NodeOwners::Id nodes;
};

UnitScope::UnitScope(std::shared_ptr<Runtime> runtime, int unit, Kind kind) {
  if (!runtime) return;
  auto use = runtime->begin(unit, kind);
  const NodeOwners::Id nodes = NodeOwners::instance().open(runtime, use);
  state_ = std::make_unique<State>(State{std::move(runtime), std::move(use), nodes});
}

UnitScope::~UnitScope() {
  // Only an exception leaves an unfinished scope; the lease goes back, if it is still out, and nothing else is to be
  // done.
  if (!state_) return;
  (void)NodeOwners::instance().close(state_->nodes);
  state_->runtime->drop(*state_->use);
}

at::Tensor UnitScope::input(const at::Tensor& tensor) {
  return state_ && tensor.defined() ? state_->runtime->follow_input(*state_->use, tensor) : tensor;
}

void UnitScope::finish(const std::vector<at::Tensor>& outputs) {
  if (!state_) return;
  state_->runtime->end_reads(*state_->use);
  state_->runtime->require_unwritten(state_->use->invocation.unit);
  state_->runtime->end_scale(*state_->use, outputs);
  const std::unique_ptr<State> state = std::move(state_);
  const Nodes own = producers(outputs, state->use->first_node);
  for (const NodePointer& node : own) {
    node->add_pre_hook(std::make_unique<BeforeOutput>(state->runtime, state->use, node->sequence_nr()));
  }
  const bool made_nodes = NodeOwners::instance().close(state->nodes);
  state->runtime->end(state->use, {.awaits_backward = made_nodes, .through_outputs = !own.empty()});
}

Gathered::Gathered(std::shared_ptr<Runtime> runtime, const std::vector<at::Tensor>& parameters, Writers writers)
    : runtime_(std::move(runtime)), writers_(writers), units_(runtime_->units_of(parameters)) {
  if (writers_.any()) {
    runtime_->require_writable(writers_);
    params_ = runtime_->params_of(parameters);
  }
  for (const int unit : units_)
    scopes_.push_back(std::make_unique<UnitScope>(runtime_, unit, UnitScope::Kind::kReading));
  // Where ranks have all parameters, one that must not write could: it undoes that as well.
  const bool may_write = writers_.rank == Writers::kAll || writers_.rank == runtime_->core().rank();
  const bool could_write = may_write || !runtime_->core().settings().plan.gathers_parameters();
  if (writers_.any() && could_write) before_ = runtime_->values_of(params_);
  if (!runtime_->scales_loss() || writers_.any()) return;
  scaled_ = parameters;
  runtime_->loss_scale().give(scaled_);
}

void Gathered::end_scale() noexcept {
  if (!scaled_.empty()) runtime_->loss_scale().drop(scaled_);
  scaled_.clear();
}

Gathered::Gathered(Gathered&&) noexcept = default;

Gathered::~Gathered() {
  end_scale();
  undo();
  while (!scopes_.empty()) scopes_.pop_back();  // the last one first
}

void Gathered::undo() noexcept {
  if (before_.empty()) return;
  try {
    (void)runtime_->take_back(params_, before_);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the engine refuses the parameters in its next call, by name
  }
  before_.clear();
}

void Gathered::finish() {
  end_scale();
  std::exception_ptr failure;
  std::vector<at::Tensor> written;
  try {
    if (!before_.empty()) written = runtime_->take_back(params_, before_);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  before_.clear();
  while (!scopes_.empty()) {
    const std::unique_ptr<UnitScope> scope = std::move(scopes_.back());
    scopes_.pop_back();
    try {
      scope->finish({});
    } catch (const Error&) {
      for (const int unit : units_) runtime_->forget_writes(unit);
      if (!writers_.any()) throw;
      failure = std::current_exception();  // all ranks hear of it, once everything is given back
    }
  }
  const Writers writers = std::exchange(writers_, {});
  if (writers.any()) runtime_->write_edits(params_, written, writers, failure);
}

}  // namespace zeroth::libtorch
