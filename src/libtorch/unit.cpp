#include <zeroth/libtorch/unit.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>

#include "libtorch/runtime.h"

namespace zeroth::libtorch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Runs `Call` on the runtime when the node it hangs on is about to run.
template <void (Runtime::*Call)(UnitUse&)>
class UseHook final : public torch::autograd::FunctionPreHook {
 public:
  UseHook(std::weak_ptr<Runtime> runtime, std::shared_ptr<UnitUse> use) : runtime_(std::move(runtime)), use_(std::move(use)) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { ((*runtime).*Call)(*use_); });
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<UnitUse> use_;
};

using Nodes = std::vector<std::shared_ptr<Node>>;

Nodes producers(const std::vector<at::Tensor>& tensors) {
  Nodes nodes;
  for (const at::Tensor& tensor : tensors) {
    std::shared_ptr<Node> node = tensor.requires_grad() ? tensor.grad_fn() : nullptr;
    if (node && std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace

struct UnitScope::State {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<UnitUse> use;
  Nodes inputs;                ///< producers, as they were before the forward could change an input in place
  bool takes_leaves = false;   ///< an input is a leaf that needs a gradient: nothing runs after the unit that could tell
};

UnitScope::UnitScope(std::shared_ptr<Runtime> runtime, int unit, std::vector<at::Tensor> inputs) {
  if (!runtime) return;
  auto use = runtime->begin(unit);
  const bool takes_leaves =
      std::ranges::any_of(inputs, [](const at::Tensor& input) { return input.requires_grad() && !input.grad_fn(); });
  state_ = std::make_unique<State>(State{std::move(runtime), std::move(use), producers(inputs), takes_leaves});
}

UnitScope::~UnitScope() {
  // Only an exception leaves an unfinished scope; the lease goes back, nothing else is to be done.
  if (state_) state_->runtime->end(*state_->use, /*awaits_backward=*/false);
}

void UnitScope::finish(const std::vector<at::Tensor>& outputs) {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  const Nodes& before = state->inputs;
  bool awaits_backward = false;
  for (const std::shared_ptr<Node>& node : producers(outputs)) {
    if (std::ranges::find(before, node) != before.end()) continue;  // an input that was passed through
    node->add_pre_hook(std::make_unique<UseHook<&Runtime::before_backward>>(state->runtime, state->use));
    awaits_backward = true;
  }
  if (awaits_backward) {
    // A tensor's hook: a producer may be an output of the unit before, whose own hook shall find this unit's slot free.
    for (const std::shared_ptr<Node>& node : before) {
      node->add_tensor_pre_hook(std::make_unique<UseHook<&Runtime::inputs_done>>(state->runtime, state->use));
    }
    // [Note: End of a unit's backward] A use is over when every producer of an input has got its gradient: all nodes of the
    // unit lie before that. Leaves have no producer, and without any input there is only the unit's own gradients to go by, which
    // say nothing of frozen parameters. Such a use lasts until the end of backward.
    const bool open_ended = state->takes_leaves || (before.empty() && !state->runtime->ends_with_gradients(state->use->invocation.unit));
    state->use->inputs_pending = static_cast<int>(before.size()) + (open_ended ? 1 : 0);
  }
  state->runtime->end(*state->use, awaits_backward);
}

}  // namespace zeroth::libtorch
