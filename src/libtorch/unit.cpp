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
    if (const auto runtime = runtime_.lock()) ((*runtime).*Call)(*use_);
    return grads;
  }

 private:
  std::weak_ptr<Runtime> runtime_;
  std::shared_ptr<UnitUse> use_;
};

std::vector<Node*> producers(const std::vector<at::Tensor>& tensors) {
  std::vector<Node*> nodes;
  for (const at::Tensor& tensor : tensors) {
    Node* node = tensor.requires_grad() ? tensor.grad_fn().get() : nullptr;
    if (node != nullptr && std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(node);
  }
  return nodes;
}

}  // namespace

struct UnitScope::State {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<UnitUse> use;
  std::vector<at::Tensor> inputs;
};

UnitScope::UnitScope(std::shared_ptr<Runtime> runtime, int unit, std::vector<at::Tensor> inputs) {
  if (!runtime) return;
  auto use = runtime->begin(unit);
  state_ = std::make_unique<State>(State{std::move(runtime), std::move(use), std::move(inputs)});
}

UnitScope::~UnitScope() {
  // Only an exception leaves an unfinished scope; the lease goes back, nothing else is to be done.
  if (state_) state_->runtime->end(*state_->use, /*awaits_backward=*/false);
}

void UnitScope::finish(const std::vector<at::Tensor>& outputs) {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  const std::vector<Node*> before = producers(state->inputs);
  bool awaits_backward = false;
  for (Node* node : producers(outputs)) {
    if (std::ranges::find(before, node) != before.end()) continue;  // an input that was passed through
    node->add_pre_hook(std::make_unique<UseHook<&Runtime::before_backward>>(state->runtime, state->use));
    awaits_backward = true;
  }
  if (awaits_backward) {
    for (Node* node : before) {
      node->add_pre_hook(std::make_unique<UseHook<&Runtime::inputs_done>>(state->runtime, state->use));
    }
    state->use->inputs_pending = static_cast<int>(before.size());
  }
  state->runtime->end(*state->use, awaits_backward);
}

}  // namespace zeroth::libtorch
