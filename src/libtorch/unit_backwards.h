// UnitBackwards: when the backward of a unit begins and when it is over.
#pragma once

#include <zeroth/engine/engine.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace zeroth::libtorch {

/// One forward of a unit, as its backward sees it.
struct UnitUse {
  Invocation invocation{};
  bool computed_again = false;   ///< for a checkpoint, in backward
  bool outermost = false;        ///< a forward in no other one: the loss scale enters and leaves there
  bool reads = false;            ///< no forward: code between Gathered's begin and end
  std::uint64_t thread = 0;      ///< autograd's number of the thread that made its nodes
  std::uint64_t first_node = 0;  ///< number of the first node that the forward could make on that thread
  std::uint64_t active_in = 0;   ///< the last backward that ran nodes of it, 0: none did
};

/// Tells the core engine which units have had their backward. One thread at a time, see Runtime::in_hook().
///
/// [Note: End of a unit's backward] Of the nodes that are ready, torch runs the youngest of a thread first, and those
/// of a backward within a backward before all others. So once a node is about to run that is older than the first node
/// of a use, or that belongs to a backward around the use's, no node of the use is left to run, and its parameters have
/// all gradients that they will get from it. The unit is over when that is true of all of its uses, and all its
/// gradients are there or no use of it is yet to come for which parameters may be waiting. Should a node of it run
/// later all the same, the unit is gathered again, and its gradients go into an event of their own. Nodes of a GPU and
/// of the CPU run on threads of their own: a use whose nodes ran on several threads lasts until the end of backward.
///
/// Where an earlier use is yet to come, far from this one, the parameters are given back meanwhile and gathered again
/// for it: a table in tiles that is embedding and head would else be whole in memory. A layer that is used several
/// times in a row keeps them.
class UnitBackwards {
 public:
  /// `core` outlives this. Before anything else.
  void follow(zeroth::Engine& core);

  /// A forward of the unit has ended. `awaits_backward`: through its outputs, which hold `use`.
  void end_forward(const std::shared_ptr<UnitUse>& use, bool awaits_backward);

  /// Backward: numbered from 1.
  [[nodiscard]] std::uint64_t number() const { return number_; }
  void begin_backward() { ++number_; }
  /// All uses that have begun are over.
  void finish_backward();
  /// It threw.
  void abandon_backward() { running_.clear(); }

  /// A node of the use is about to run. False if that is no news.
  [[nodiscard]] bool begin(const std::shared_ptr<UnitUse>& use);
  /// Ends the uses that are over now that the node `node` of the thread `thread` is about to run.
  void finish_younger_than(std::uint64_t thread, std::uint64_t node);
  /// Gives the unit's parameters back if nothing of it is left to run.
  void finish_unit(int unit);

 private:
  /// A use of a unit whose backward has begun and is not known to be over.
  struct Running {
    std::shared_ptr<UnitUse> use;
    int graph_task;
    std::thread::id ran_on;
    bool several_threads = false;
    bool over = false;
    bool given_back = false;
  };
  void finish(int unit);
  /// Forwards since the last use before this one that has not had its backward; 0: there is none.
  [[nodiscard]] std::uint64_t forwards_since_earlier_use(const Invocation& use) const;
  [[nodiscard]] bool runs(int unit) const;  ///< a use of it that is not over

  zeroth::Engine* core_ = nullptr;
  std::uint64_t number_ = 0;
  std::vector<Running> running_;
  std::vector<std::vector<std::weak_ptr<const UnitUse>>>
      awaited_;  // per unit, in order, those of which no backward has begun
};

}  // namespace zeroth::libtorch
