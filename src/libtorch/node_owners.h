// NodeOwners: which units' forwards made a node of autograd's graph. One table for the process.
//
// [Note: Nodes by number] Autograd numbers the nodes that a thread makes (at::sequence_number), and a node keeps its
// number and its thread. So the nodes of one forward of a unit are a range of numbers. Before each node of a backward
// runs, torch tells its number (at::RecordFunction, scope BACKWARD_FUNCTION). So the engine sees every node of a unit,
// whatever way the backward took to it: through an output, a view of it that was written to, a tensor that left the
// unit beside its outputs, a checkpoint, a transform of torch.func. Nodes that are made while a node runs
// (create_graph) belong to the units of that node, and so do those that torch makes after it, before the next one runs:
// it brings gradients to the dtype of their tensors, and adds those that meet.
#pragma once

#include "libtorch/unit_backwards.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace zeroth::libtorch {

class Runtime;

class NodeOwners {
 public:
  /// The table of this process; a forked child has an empty one.
  static NodeOwners& instance();

  struct Owner {
    std::shared_ptr<Runtime> runtime;
    std::shared_ptr<UnitUse> use;
  };
  using Id = std::uint64_t;

  /// From now on the nodes of this thread belong to `use`. Sets the use's thread and first node.
  [[nodiscard]] Id open(const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<UnitUse>& use);
  /// On the thread of open(). Returns true if nodes were made.
  bool close(Id id);

  /// Uses in whose forwards the nodes `begin` to `end` of a thread were made, the outermost first; without those of
  /// engines that are gone.
  struct Owners {
    std::uint64_t begin = 0, end = 0;
    std::uint64_t generation = 0;  ///< of the table: what is said here holds for so long
    std::vector<Owner> list{};
  };
  /// The most nodes around `node` that have the same owners.
  [[nodiscard]] Owners owners(std::uint64_t thread, std::uint64_t node);
  [[nodiscard]] std::uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  /// Engines of this process, in the order of their making. Once one of them scales its loss, nodes are looked at for
  /// the levels of gradients, see GradientLevel.
  void add_engine(const std::shared_ptr<Runtime>& runtime);
  [[nodiscard]] std::vector<std::shared_ptr<Runtime>> engines();

  /// The node that runs now was made in a forward of `runtime`.
  [[nodiscard]] bool runs_node_of(const Runtime& runtime);
  /// A node of a graph was made in a forward of `runtime`, and not by what reads parameters beside it.
  [[nodiscard]] bool is_of_forward(const torch::autograd::Node& node, const Runtime& runtime);

  /// While a node of `owners` runs and makes nodes for a further backward: opens ranges of the same units, or the last
  /// ones again if they have the same owners.
  [[nodiscard]] std::vector<Id> open_again(const std::vector<Owner>& owners);
  /// The node has run. What `ids` hold stays open until the next close_last(), which before the next node comes.
  void leave_again(const std::vector<Id>& ids);
  /// On this thread no further node belongs to the node that ran last.
  void close_last();

 private:
  NodeOwners();

  static constexpr Id kNone = ~Id{0};

  struct Range {
    std::uint64_t first = 0;
    std::optional<std::uint64_t> last{};  ///< one past the end; none: open
    Id parent = kNone;                    ///< the range around it
    std::weak_ptr<Runtime> runtime{};
    std::weak_ptr<UnitUse> use{};  ///< gone with the graph behind the unit's outputs
    Invocation invocation{};
    bool reads = false;
  };
  /// Of one thread: ranges in the order of their beginning. `ranges[i]` has the id `base + i`.
  struct Thread {
    std::deque<Range> ranges{};
    Id base = 0;
    std::vector<Id> open{};
    std::vector<Id> left{};        ///< of the last leave_again(), still open
    std::vector<Id> last_again{};  ///< of the last open_again()
  };

  [[nodiscard]] static Range* find(Thread& thread, Id id);
  Id push(Thread& thread, const std::shared_ptr<Runtime>& runtime, const std::shared_ptr<UnitUse>& use);
  bool close(Thread& thread, Id id);
  void close_last(Thread& thread);

  std::mutex mutex_;
  std::vector<std::weak_ptr<Runtime>> engines_;
  std::atomic<std::uint64_t> generation_{1};  ///< number of changes
  std::unordered_map<std::uint64_t, Thread> threads_;
};

}  // namespace zeroth::libtorch
