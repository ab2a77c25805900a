#include "libtorch/node_owners.h"

#include "libtorch/loss_scale.h"
#include "libtorch/runtime.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// Ranges that a thread keeps; graphs of older forwards are not followed any more: of some hundred steps.
constexpr std::size_t kMostRanges = 16'384;

std::atomic<NodeOwners*> table{nullptr};
std::atomic<bool> watches_entries{false};  // some engine was made that scales its loss

/// Nodes that the running node makes.
class MadeByNode final : public at::ObserverContext {
 public:
  explicit MadeByNode(const std::vector<NodeOwners::Owner>& owners) : ids_(NodeOwners::instance().open_again(owners)) {}
  MadeByNode(const MadeByNode&) = delete;
  MadeByNode& operator=(const MadeByNode&) = delete;
  ~MadeByNode() override { NodeOwners::instance().close_again(ids_); }

 private:
  std::vector<NodeOwners::Id> ids_;
};

/// Nodes of which the last one that ran on this thread was one: their units know already that they run.
struct Known {
  int graph_task = -1;
  std::uint64_t thread = 0, begin = 0, end = 0, generation = 0;
};
thread_local Known known;

bool is_of_forward(const NodeOwners::Owners& owners, const std::shared_ptr<Runtime>& runtime) {
  return std::ranges::any_of(
      owners.list, [&](const NodeOwners::Owner& owner) { return owner.runtime == runtime && !owner.use->reads; });
}

/// Engines whose backward began without the scale: no edge of the node that runs may lead into their forwards past the
/// nodes that bring it.
void look_at_entries(const NodeOwners::Owners& owners) {
  NodeOwners& nodes = NodeOwners::instance();
  const auto node = torch::autograd::get_current_node();
  if (!node || LossScale::is_entry(*node)) return;
  for (const std::shared_ptr<Runtime>& runtime : nodes.watched()) {
    if (!runtime->scales_entries()) continue;
    if (is_of_forward(owners, runtime)) {
      if (!runtime->in_backward()) runtime->refuse_entry("");
      continue;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      if (!edge.function || LossScale::is_entry(*edge.function)) continue;
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get())) {
        if (const std::string name = runtime->name_of_parameter(leaf->variable); !name.empty())
          runtime->refuse_entry(name);
      } else if (is_of_forward(nodes.owners(edge.function->thread_id(), edge.function->sequence_nr()), runtime)) {
        runtime->refuse_entry("");
      }
    }
  }
}

/// Torch's callback before a node runs. Torch logs what is thrown here and goes on, so nothing is.
std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // an accumulator of a leaf
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return nullptr;  // called by hand, in no backward
  const auto node = static_cast<std::uint64_t>(function.seqNr());
  const std::uint64_t thread = function.forwardThreadId();
  NodeOwners& nodes = NodeOwners::instance();
  if (watches_entries.load(std::memory_order_relaxed)) look_at_entries(nodes.owners(thread, node));
  // Within backward, grad mode is on only for create_graph.
  const bool makes_nodes = at::GradMode::is_enabled();
  if (!makes_nodes && task == known.graph_task && thread == known.thread && node >= known.begin && node < known.end &&
      known.generation == nodes.generation()) {
    return nullptr;
  }
  const NodeOwners::Owners owners = nodes.owners(thread, node);
  for (const NodeOwners::Owner& owner : owners.list) owner.runtime->before_node(owner.use, node);
  known = {task, thread, owners.begin, owners.end, owners.generation};
  if (owners.list.empty() || !makes_nodes) return nullptr;
  return std::make_unique<MadeByNode>(owners.list);
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

void NodeOwners::watch_entries(const std::shared_ptr<Runtime>& runtime) {
  const std::lock_guard lock(mutex_);
  watched_.emplace_back(runtime);
  watches_entries = true;
}

std::vector<std::shared_ptr<Runtime>> NodeOwners::watched() {
  const std::lock_guard lock(mutex_);
  std::erase_if(watched_, [](const auto& one) { return one.expired(); });
  watches_entries = !watched_.empty();
  std::vector<std::shared_ptr<Runtime>> all;
  for (const auto& one : watched_) {
    if (auto runtime = one.lock()) all.push_back(std::move(runtime));
  }
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
  return push(threads_[at::RecordFunction::currentThreadId()], runtime, use);
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

void NodeOwners::close_again(const std::vector<Id>& ids) {
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[at::RecordFunction::currentThreadId()];
  for (std::size_t index = ids.size(); index-- > 0;) (void)close(thread, ids[index]);
  thread.last_again = ids;
  std::erase_if(thread.last_again, [&](Id id) { return find(thread, id) == nullptr; });  // no nodes: closed for good
}

}  // namespace zeroth::libtorch
