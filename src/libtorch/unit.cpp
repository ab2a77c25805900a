#include "libtorch/runtime.h"

#include <zeroth/libtorch/unit.h>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace zeroth::libtorch {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Calls `Tell` with the runtime, if that is still there, when the node that the hook hangs on is about to run (Before)
/// or has run (After).
template <class Tell>
class Before final : public torch::autograd::FunctionPreHook {
 public:
  Before(std::weak_ptr<Runtime> runtime, Tell tell) : runtime_(std::move(runtime)), tell_(std::move(tell)) {}

  variable_list operator()(const variable_list& grads) override {
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { tell_(*runtime); });
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<Runtime> runtime_;
  Tell tell_;
};

template <class Tell>
class After final : public torch::autograd::FunctionPostHook {
 public:
  After(std::weak_ptr<Runtime> runtime, Tell tell) : runtime_(std::move(runtime)), tell_(std::move(tell)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (const auto runtime = runtime_.lock()) runtime->in_hook([&] { tell_(*runtime); });
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<Runtime> runtime_;
  Tell tell_;
};

template <template <class> class Hook, class Tell>
std::unique_ptr<Hook<Tell>> make_hook(const std::shared_ptr<Runtime>& runtime, Tell tell) {
  return std::make_unique<Hook<Tell>>(runtime, std::move(tell));
}

using Nodes = std::vector<std::shared_ptr<Node>>;

/// Where the gradients of tensors go: their producers, the accumulators of leaves. Each once.
Nodes receivers(const std::vector<at::Tensor>& tensors) {
  Nodes nodes;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.requires_grad()) continue;
    std::shared_ptr<Node> node = torch::autograd::impl::gradient_edge(tensor).function;
    if (node && std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(std::move(node));
  }
  return nodes;
}

bool accumulates(const Node& node) {
  return node.sequence_nr() == std::numeric_limits<std::uint64_t>::max();
}

/// For each of `inputs` the nodes made since `first`, from `outputs` on, that hand a gradient to it. What the forward
/// took from elsewhere than its arguments, engine's parameters aside, is added to `inputs`.
std::vector<Nodes> senders(const Nodes& outputs, Nodes& inputs, std::uint64_t first, const Runtime& runtime) {
  const auto from_elsewhere = [&](Node& node) {
    if (!accumulates(node)) return node.sequence_nr() < first;
    const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
    return leaf != nullptr && !runtime.has_parameter(leaf->variable);
  };
  std::vector<Nodes> found(inputs.size());
  Nodes left = outputs;
  std::unordered_set<const Node*> seen;
  while (!left.empty()) {
    const std::shared_ptr<Node> node = std::move(left.back());
    left.pop_back();
    if (node->sequence_nr() < first || accumulates(*node) || !seen.insert(node.get()).second) continue;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (!edge.function) continue;
      const auto input = static_cast<std::size_t>(std::ranges::find(inputs, edge.function) - inputs.begin());
      if (input == inputs.size()) {
        if (!from_elsewhere(*edge.function)) {
          left.push_back(edge.function);
          continue;
        }
        inputs.push_back(edge.function);
        found.emplace_back();
      }
      if (found[input].empty() || found[input].back() != node) found[input].push_back(node);
    }
  }
  return found;
}

}  // namespace

struct UnitScope::State {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<UnitUse> use;
  Nodes inputs{};  ///< receivers, as they were before the forward could change an input in place
};

UnitScope::UnitScope(std::shared_ptr<Runtime> runtime, int unit, std::vector<at::Tensor> inputs) {
  if (!runtime) return;
  auto use = runtime->begin(unit);
  use->first_node = at::sequence_number::peek();
  state_ = std::make_unique<State>(State{std::move(runtime), std::move(use), receivers(inputs)});
}

UnitScope::~UnitScope() {
  // Only an exception leaves an unfinished scope; the lease goes back, if it is still out, and nothing else is to be
  // done.
  if (state_) state_->runtime->drop(*state_->use);
}

void UnitScope::finish(const std::vector<at::Tensor>& outputs) {
  if (!state_) return;
  state_->runtime->require_unwritten(state_->use->invocation.unit);
  const std::unique_ptr<State> state = std::move(state_);
  Nodes own = receivers(outputs);
  std::erase_if(own, [&state](const auto& node) {  // a leaf, or an input that was passed through
    return accumulates(*node) || std::ranges::find(state->inputs, node) != state->inputs.end();
  });
  for (const std::shared_ptr<Node>& node : own) {
    node->add_pre_hook(
        make_hook<Before>(state->runtime, [use = state->use](Runtime& runtime) { runtime.before_backward(*use); }));
  }
  if (!own.empty()) {
    // [Note: End of a unit's backward] A use is over when all nodes of the unit have run. Those that lead to an input
    // have when each node that hands a gradient to it has; those that lead to parameters, when these have their
    // gradients. Some nodes of a unit may never run, because nobody uses the output behind them: then the input's
    // producer tells, which runs when its gradient is whole. It is no good alone: other units may take the same input
    // (an encoder's output in a decoder), a leaf has no producer, and another output of the unit before may come first.
    // An input to which no node leads is not waited for; what the unit took from elsewhere (an attribute, a closure)
    // counts as an input. Without any input there are only the unit's own gradients to go by, which say nothing of
    // frozen parameters: such a use lasts until the end of backward.
    const std::vector<Nodes> handing = senders(own, state->inputs, state->use->first_node, *state->runtime);
    for (std::size_t index = 0; index < handing.size(); ++index) {
      if (handing[index].empty()) continue;
      const std::size_t input = state->use->inputs.size();
      state->use->inputs.push_back({.senders = static_cast<int>(handing[index].size())});
      for (const std::shared_ptr<Node>& node : handing[index]) {
        node->add_post_hook(make_hook<After>(state->runtime, [use = state->use, input](Runtime& runtime) {
          runtime.backwards().input_sent(*use, input);
        }));
      }
      if (!accumulates(*state->inputs[index])) {
        // A tensor's hook comes before those of the node, which may be an output of the unit before.
        state->inputs[index]->add_tensor_pre_hook(make_hook<Before>(
            state->runtime,
            [use = state->use, input](Runtime& runtime) { runtime.backwards().input_whole(*use, input); }));
      }
    }
    state->use->open_ended =
        state->use->inputs.empty() && !state->runtime->ends_with_gradients(state->use->invocation.unit);
  }
  state->runtime->end(state->use, /*awaits_backward=*/!own.empty());
}

}  // namespace zeroth::libtorch
