#include "libtorch/node_owners.h"

#include "libtorch/gradient_level.h"
#include "libtorch/loss_scale.h"
#include "libtorch/runtime.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// Ranges that a thread keeps; graphs of older forwards are not followed any more: of some hundred steps.
constexpr std::size_t kMostRanges = 16'384;

std::atomic<NodeOwners*> table{nullptr};
std::atomic<bool> watches_levels{false};  // some engine was made that scales its loss

/// On this thread nodes still belong to the one that ran last.
thread_local bool left_open = false;

/// Nodes that the running node makes, and torch after it.
class MadeByNode {
 public:
  MadeByNode(const std::vector<NodeOwners::Owner>& owners, bool leaves_forward)
      : ids_(NodeOwners::instance().open_again(owners)), leaves_forward_(leaves_forward) {}
  MadeByNode(const MadeByNode&) = delete;
  MadeByNode& operator=(const MadeByNode&) = delete;
  ~MadeByNode() {
    NodeOwners& nodes = NodeOwners::instance();
    nodes.leave_again(ids_);
    if (leaves_forward_) nodes.close_last();
  }

 private:
  std::vector<NodeOwners::Id> ids_;
  bool leaves_forward_;  ///< what comes after it is outside
};

/// Nodes of which the last one that ran on this thread was one: their units know already that they run.
struct Known {
  int graph_task = -1;
  std::uint64_t thread = 0, begin = 0, end = 0, generation = 0;
};
thread_local Known known;

/// A node that runs: code inside of it has a level of its own, and the nodes it makes have the owners that it has.
class RunningNode final : public at::ObserverContext {
 public:
  RunningNode(std::shared_ptr<GradientLevel> level, const std::vector<NodeOwners::Owner>* owners) {
    if (owners != nullptr) {
      const auto node = torch::autograd::get_current_node();
      const auto* const crossing = node ? LossScale::crossing(*node) : nullptr;
      made_.emplace(*owners, crossing != nullptr && !crossing->enters);
    }
    if (level) level_.emplace(std::move(level));
  }

 private:
  std::optional<MadeByNode> made_;
  std::optional<LevelScope> level_;
};

/// Torch's callback before a node runs. Torch logs what is thrown here and goes on, so nothing is.
std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // an accumulator of a leaf
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return nullptr;  // called by hand, in no backward
  const auto node = static_cast<std::uint64_t>(function.seqNr());
  const std::uint64_t thread = function.forwardThreadId();
  NodeOwners& nodes = NodeOwners::instance();
  if (left_open) nodes.close_last();
  std::shared_ptr<GradientLevel> level;
  if (watches_levels.load(std::memory_order_relaxed)) {
    if (const auto running = torch::autograd::get_current_node())
      level = look_at_edges(*running, nodes.owners(thread, node));
  }
  const auto context = [&](const std::vector<NodeOwners::Owner>* owners) -> std::unique_ptr<at::ObserverContext> {
    if (!level && owners == nullptr) return nullptr;
    return std::make_unique<RunningNode>(std::move(level), owners);
  };
  // Within backward, grad mode is on only for create_graph.
  const bool makes_nodes = at::GradMode::is_enabled();
  if (!makes_nodes && task == known.graph_task && thread == known.thread && node >= known.begin && node < known.end &&
      known.generation == nodes.generation()) {
    return context(nullptr);
  }
  const NodeOwners::Owners owners = nodes.owners(thread, node);
  for (const NodeOwners::Owner& owner : owners.list) owner.runtime->before_node(owner.use, node);
  known = {task, thread, owners.begin, owners.end, owners.generation};
  return context(owners.list.empty() || !makes_nodes ? nullptr : &owners.list);
}

}  // namespace

NodeOwners& NodeOwners::instance() {
  if (table.load(std::memory_order_acquire) == nullptr) {
    // Threads of the parent, which may hold its lock, are not in a child. Neither table ever goes away.
    static const bool once = [] {
      table.store(new NodeOwners, std::memory_order_release);
      (void)pthread_atfork(nullptr, nullptr, [] { table.store(new NodeOwners, std::memory_order_release); });
      (void)at::addGlobalCallback(
          at::RecordFunctionCallback(&before_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
      return true;
    }();
    (void)once;
  }
  return *table.load(std::memory_order_acquire);
}

NodeOwners::NodeOwners() = default;

void NodeOwners::add_engine(const std::shared_ptr<Runtime>& runtime) {
  const std::lock_guard lock(mutex_);
  engines_.emplace_back(runtime);
  if (runtime->scales_loss()) watches_levels = true;
}

std::vector<std::shared_ptr<Runtime>> NodeOwners::engines() {
  const std::lock_guard lock(mutex_);
  std::erase_if(engines_, [](const auto& one) { return one.expired(); });
  std::vector<std::shared_ptr<Runtime>> all;
  for (const auto& one : engines_) {
    if (auto runtime = one.lock()) all.push_back(std::move(runtime));
  }
  watches_levels = std::ranges::any_of(all, [](const auto& runtime) { return runtime->scales_loss(); });
  return all;
}

bool NodeOwners::is_of_forward(const torch::autograd::Node& node, const Runtime& runtime) {
  const Owners found = owners(node.thread_id(), node.sequence_nr());
  return std::ranges::any_of(found.list,
                             [&](const Owner& owner) { return owner.runtime.get() == &runtime && !owner.use->reads; });
}

bool NodeOwners::runs_node_of(const Runtime& runtime) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const Owners found = owners(node->thread_id(), node->sequence_nr());
  return std::ranges::any_of(found.list, [&](const Owner& owner) { return owner.runtime.get() == &runtime; });
}

NodeOwners::Range* NodeOwners::find(Thread& thread, Id id) {
  if (id == kNone || id < thread.base || id - thread.base >= thread.ranges.size()) return nullptr;
  return &thread.ranges[id - thread.base];
}

NodeOwners::Id NodeOwners::push(Thread& thread, const std::shared_ptr<Runtime>& runtime,
                                const std::shared_ptr<UnitUse>& use) {
  if (thread.ranges.size() == kMostRanges) {
    thread.ranges.pop_front();
    ++thread.base;
  }
  ++generation_;
  use->thread = at::RecordFunction::currentThreadId();
  use->first_node = at::sequence_number::peek();
  thread.ranges.push_back({.first = use->first_node,
                           .parent = thread.open.empty() ? kNone : thread.open.back(),
                           .runtime = runtime,
                           .use = use,
                           .invocation = use->invocation,
                           .reads = use->reads});
  const Id id = thread.base + thread.ranges.size() - 1;
  thread.open.push_back(id);
  return id;
}

NodeOwners::Id NodeOwners::open(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<UnitUse>& use) {
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[at::RecordFunction::currentThreadId()];
  close_last(thread);
  return push(thread, runtime, use);
}

bool NodeOwners::close(Id id) {
  const std::lock_guard lock(mutex_);
  return close(threads_[at::RecordFunction::currentThreadId()], id);
}

bool NodeOwners::close(Thread& thread, Id id) {
  ++generation_;
  std::erase(thread.open, id);
  Range* const range = find(thread, id);
  if (range == nullptr) return true;  // it was dropped for younger ones
  range->last = at::sequence_number::peek();
  if (*range->last > range->first) return true;
  if (id + 1 == thread.base + thread.ranges.size()) thread.ranges.pop_back();
  return false;
}

NodeOwners::Owners NodeOwners::owners(std::uint64_t thread_number, std::uint64_t node) {
  const std::lock_guard lock(mutex_);
  Owners found{.begin = 0, .end = ~std::uint64_t{0}, .generation = generation()};
  Thread& thread = threads_[thread_number];
  const auto after = std::ranges::upper_bound(thread.ranges, node, {}, &Range::first);
  if (after != thread.ranges.end()) found.end = after->first;
  if (after == thread.ranges.begin()) return found;
  for (Id id = thread.base + static_cast<Id>(after - thread.ranges.begin()) - 1; Range* range = find(thread, id);
       id = range->parent) {
    if (range->last && *range->last <= node) {
      found.begin = std::max(found.begin, *range->last);
      continue;
    }
    found.begin = std::max(found.begin, range->first);
    if (range->last) found.end = std::min(found.end, *range->last);
    std::shared_ptr<Runtime> runtime = range->runtime.lock();
    if (!runtime) continue;
    std::shared_ptr<UnitUse> use = range->use.lock();
    if (!use) {
      use = std::make_shared<UnitUse>(UnitUse{
          .invocation = range->invocation, .reads = range->reads, .thread = thread_number, .first_node = range->first});
      range->use = use;
    }
    found.list.push_back({std::move(runtime), std::move(use)});
  }
  std::ranges::reverse(found.list);
  return found;
}

std::vector<NodeOwners::Id> NodeOwners::open_again(const std::vector<Owner>& owners) {
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[at::RecordFunction::currentThreadId()];
  close_last(thread);
  std::vector<Id> ids;
  bool same = !thread.last_again.empty() && thread.last_again.back() + 1 == thread.base + thread.ranges.size();
  for (std::size_t index = 0; index < owners.size(); ++index) {
    Range* const last = same && index < thread.last_again.size() ? find(thread, thread.last_again[index]) : nullptr;
    same = last != nullptr && last->last && last->runtime.lock() == owners[index].runtime &&
           last->invocation.forward_seq == owners[index].use->invocation.forward_seq;
    if (same) {
      last->last.reset();
      thread.open.push_back(thread.last_again[index]);
      ids.push_back(thread.last_again[index]);
    } else {
      const auto use = std::make_shared<UnitUse>(UnitUse{.invocation = owners[index].use->invocation});
      ids.push_back(push(thread, owners[index].runtime, use));
    }
  }
  return ids;
}

void NodeOwners::leave_again(const std::vector<Id>& ids) {
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[at::RecordFunction::currentThreadId()];
  close_last(thread);  // of a backward inside of the node
  thread.left = ids;
  left_open = true;
}

void NodeOwners::close_last() {
  const std::lock_guard lock(mutex_);
  close_last(threads_[at::RecordFunction::currentThreadId()]);
}

void NodeOwners::close_last(Thread& thread) {
  left_open = false;
  if (thread.left.empty()) return;
  for (std::size_t index = thread.left.size(); index-- > 0;) (void)close(thread, thread.left[index]);
  thread.last_again = std::exchange(thread.left, {});
  std::erase_if(thread.last_again, [&](Id id) { return find(thread, id) == nullptr; });  // no nodes: closed for good
}

}  // namespace zeroth::libtorch
