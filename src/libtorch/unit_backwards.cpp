#include "libtorch/unit_backwards.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

namespace zeroth::libtorch {

void UnitBackwards::follow(zeroth::Engine& core) {
  core_ = &core;
  active_uses_.assign(core.layout().units.size(), 0);
  awaited_.resize(core.layout().units.size());
}

void UnitBackwards::end_forward(const std::shared_ptr<UnitUse>& use, bool awaits_backward) {
  use->last_begun = last_begun_;
  if (!awaits_backward) return;
  std::vector<std::weak_ptr<const UnitUse>>& awaited = awaited_[static_cast<std::size_t>(use->invocation.unit)];
  std::erase_if(awaited, [](const auto& other) { return other.expired(); });
  awaited.push_back(use);
}

// [Note: Parameters without a gradient] Of a unit some of whose parameters get no gradient, nobody can tell by its
// gradients that they are all there. Torch runs the nodes made last first, those of a backward within a backward before
// all others: once a node is about to run that is older than a use, or belongs to a graph around the use's, nothing of
// the use is left to run; and nothing of the unit, unless another use of it is yet to come, which parameters may be
// waiting for. (Nodes of a GPU and of the CPU run on threads of their own, so parameters stay gathered where the use is
// not known to have handed its inputs' gradients on.) No such node may come before the root's last gradient: uses that
// have handed theirs on then bring nothing more, or it goes into an event of its own.
template <class Over>
void UnitBackwards::finish_uses(const Over& over) {
  for (std::size_t index = running_.size(); index-- > 0;) {
    if (!over(running_[index])) continue;
    const Invocation use = running_[index].use;
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
    core_->end_gradients(use.unit);
    if (active(use.unit) == 0) core_->post_backward(use.unit);
  }
}

bool UnitBackwards::awaits_earlier_use(const Invocation& use) const {
  return std::ranges::any_of(awaited_[static_cast<std::size_t>(use.unit)], [&](const auto& other) {
    const std::shared_ptr<const UnitUse> earlier = other.lock();
    return earlier && earlier->active_in == 0 && earlier->invocation.forward_seq < use.forward_seq;
  });
}

template <class Younger>
void UnitBackwards::finish_earlier(const Younger& younger) {
  const int task = torch::autograd::get_current_graph_task_id();
  finish_uses([&](const Running& running) {
    const bool over = running.graph_task > task || (running.graph_task == task && younger(running));
    return over && !awaits_earlier_use(running.use);
  });
}

void UnitBackwards::input_sent(UnitUse& use, std::size_t input) {
  if (use.active_in == number_ && --use.inputs[input].senders_left == 0) input_whole(use, input);
}

void UnitBackwards::input_whole(UnitUse& use, std::size_t input) {
  if (use.active_in != number_ || std::exchange(use.inputs[input].done, true) || --use.inputs_left > 0) return;
  --active(use.invocation.unit);
  finish_unit(use.invocation.unit);
}

void UnitBackwards::finish_unit(int unit) {
  // Gathered parameters may be read until every node of the unit has run: all gradients are there, and every running
  // use has handed its inputs' gradients on.
  if (active(unit) == 0 && core_->gradients_complete(unit)) core_->post_backward(unit);
}

void UnitBackwards::finish_backward() {
  active_uses_.assign(active_uses_.size(), 0);
  finish_uses([](const Running&) { return true; });
}

void UnitBackwards::abandon_backward() {
  active_uses_.assign(active_uses_.size(), 0);
  running_.clear();
}

bool UnitBackwards::begin(UnitUse& use) {
  if (use.active_in == number_) return false;
  finish_earlier([&use](const Running& running) { return running.use.forward_seq > use.last_begun; });
  use.active_in = number_;
  for (UnitUse::Input& input : use.inputs) input = {.senders = input.senders, .senders_left = input.senders};
  use.inputs_left = static_cast<int>(use.inputs.size());
  if (use.inputs_left > 0 || use.open_ended) ++active(use.invocation.unit);
  running_.push_back({use.invocation, use.first_node, torch::autograd::get_current_graph_task_id()});
  return true;
}

void UnitBackwards::finish_younger_than(const torch::autograd::Node* node) {
  finish_earlier(
      [node](const Running& running) { return node != nullptr && running.first_node > node->sequence_nr(); });
}

void UnitBackwards::end_gradients_before(int unit) {
  for (std::size_t index = running_.size(); index-- > 0;) {
    const Invocation& other = running_[index].use;
    if (other.unit == unit || active(other.unit) > 0 || awaits_earlier_use(other)) continue;
    core_->end_gradients(other.unit);
  }
}

}  // namespace zeroth::libtorch
