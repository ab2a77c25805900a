#include "libtorch/unit_backwards.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

namespace zeroth::libtorch {

void UnitBackwards::follow(zeroth::Engine& core) {
  core_ = &core;
  awaited_.resize(core.layout().units.size());
}

void UnitBackwards::end_forward(const std::shared_ptr<UnitUse>& use, bool awaits_backward) {
  if (!awaits_backward) return;
  std::vector<std::weak_ptr<const UnitUse>>& awaited = awaited_[static_cast<std::size_t>(use->invocation.unit)];
  std::erase_if(awaited, [](const auto& other) { return other.expired(); });
  awaited.push_back(use);
}

bool UnitBackwards::runs(int unit) const {
  return std::ranges::any_of(running_,
                             [unit](const Running& one) { return one.use->invocation.unit == unit && !one.over; });
}

void UnitBackwards::finish(int unit) {
  std::erase_if(running_, [unit](const Running& one) { return one.use->invocation.unit == unit; });
  core_->end_gradients(unit);
  core_->post_backward(unit);
}

std::uint64_t UnitBackwards::forwards_since_earlier_use(const Invocation& use) const {
  std::uint64_t least = 0;
  for (const auto& other : awaited_[static_cast<std::size_t>(use.unit)]) {
    const std::shared_ptr<const UnitUse> earlier = other.lock();
    if (!earlier || earlier->active_in != 0 || earlier->invocation.forward_seq >= use.forward_seq) continue;
    const std::uint64_t between = use.forward_seq - earlier->invocation.forward_seq;
    least = least == 0 ? between : std::min(least, between);
  }
  return least;
}

void UnitBackwards::finish_younger_than(std::uint64_t thread, std::uint64_t node) {
  if (running_.empty()) return;
  const int task = torch::autograd::get_current_graph_task_id();
  const std::thread::id here = std::this_thread::get_id();
  for (Running& running : running_) {
    if (running.several_threads || running.ran_on != here) continue;
    const bool younger = running.use->thread == thread && running.use->first_node > node;
    running.over = running.over || running.graph_task > task || (running.graph_task == task && younger);
  }
  for (std::size_t index = running_.size(); index-- > 0;) {  // the last one first
    if (index >= running_.size()) continue;                  // with others of its unit
    Running& last = running_[index];
    const int unit = last.use->invocation.unit;
    if (!last.over || last.given_back || runs(unit)) continue;
    const std::uint64_t since = core_->gradients_complete(unit) ? 0 : forwards_since_earlier_use(last.use->invocation);
    if (since == 0) {
      finish(unit);
    } else if (core_->layout().units[static_cast<std::size_t>(unit)].uses > 1 ||
               since > static_cast<std::uint64_t>(core_->settings().plan.ring_slots)) {
      last.given_back = true;
      core_->post_backward(unit);
    }
  }
}

void UnitBackwards::finish_unit(int unit) {
  // Gathered parameters may be read until every node of the unit has run.
  if (core_->gradients_complete(unit) && !runs(unit)) finish(unit);
}

void UnitBackwards::finish_backward() {
  while (!running_.empty()) finish(running_.back().use->invocation.unit);
}

bool UnitBackwards::begin(const std::shared_ptr<UnitUse>& use) {
  const std::thread::id here = std::this_thread::get_id();
  for (Running& running : running_) {
    if (running.use != use) continue;
    running.several_threads = running.several_threads || running.ran_on != here;
    running.over = false;
    return std::exchange(running.given_back, false);
  }
  use->active_in = number_;
  running_.push_back({use, torch::autograd::get_current_graph_task_id(), here});
  return true;
}

}  // namespace zeroth::libtorch
