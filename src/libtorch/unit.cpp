#include "libtorch/node_owners.h"
#include "libtorch/runtime.h"

#include <zeroth/libtorch/unit.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>

namespace zeroth::libtorch {
namespace {

using torch::autograd::variable_list;

/// Tells the runtime, if that is still there, that a node behind an output is about to run. NodeOwners would tell it,
/// too, but only from here errors reach the caller of backward as they are.
class BeforeOutput final : public torch::autograd::FunctionPreHook {
 public:
  BeforeOutput(std::weak_ptr<Runtime> runtime, std::shared_ptr<UnitUse> use, std::uint64_t node)
      : runtime_(std::move(runtime)), use_(std::move(use)), node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { runtime->before_backward(use_, node_); });
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<UnitUse> use_;
  std::uint64_t node_;
};

using NodePointer = decltype(torch::autograd::Edge::function);  // shared, or since torch 2.15 intrusive
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

void UnitScope::follow_inputs(const std::vector<at::Tensor>& inputs) {
  if (state_) state_->runtime->follow_inputs(*state_->use, inputs);
}

void UnitScope::finish(const std::vector<at::Tensor>& outputs) {
  if (!state_) return;
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

Gathered::Gathered(const std::shared_ptr<Runtime>& runtime, const std::vector<at::Tensor>& parameters) {
  for (const int unit : runtime->units_of(parameters))
    scopes_.push_back(std::make_unique<UnitScope>(runtime, unit, UnitScope::Kind::kReading));
  if (!runtime->scales_loss()) return;
  runtime_ = runtime;
  parameters_ = parameters;
  runtime_->loss_scale().give(parameters_);
}

void Gathered::end_scale() noexcept {
  if (runtime_) runtime_->loss_scale().drop(parameters_);
  runtime_ = nullptr;
}

Gathered::~Gathered() {
  end_scale();
  while (!scopes_.empty()) scopes_.pop_back();  // the last one first
}

void Gathered::finish() {
  end_scale();
  while (!scopes_.empty()) {
    const std::unique_ptr<UnitScope> scope = std::move(scopes_.back());
    scopes_.pop_back();
    scope->finish({});
  }
}

}  // namespace zeroth::libtorch
