// UnitBackwards: when the backward of a unit is over.
#pragma once

#include <zeroth/engine/engine.h>

#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace zeroth::libtorch {

/// One forward of a unit, as its backward sees it.
struct UnitUse {
  Invocation invocation{};
  /// An input that needs a gradient.
  struct Input {
    int senders = 0;       ///< nodes of the unit that hand it one
    int senders_left = 0;  ///< of them, those that have not yet run in the backward `active_in`
    bool done = false;     ///< in that backward
  };
  std::vector<Input> inputs{};
  bool open_ended = false;       ///< nothing tells when the unit's backward is over
  bool computed_again = false;   ///< for a checkpoint, in backward
  std::uint64_t first_node = 0;  ///< autograd's number of the first node that the forward could make
  std::uint64_t last_begun = 0;  ///< number of the forward of a unit that began last before this one ended
  std::uint64_t active_in = 0;   ///< backward in which the outputs' nodes ran
  int inputs_left = 0;           ///< inputs that are not done in that backward
};

/// Tells the core engine which units have had their backward. One thread at a time, see Runtime::in_hook().
class UnitBackwards {
 public:
  /// `core` outlives this. Before anything else.
  void follow(zeroth::Engine& core);

  /// Forward.
  void begin_forward(const UnitUse& use) { last_begun_ = use.invocation.forward_seq; }
  void end_forward(const std::shared_ptr<UnitUse>& use, bool awaits_backward);

  /// Backward: numbered from 1.
  [[nodiscard]] std::uint64_t number() const { return number_; }
  void begin_backward() { ++number_; }
  /// All uses that have begun are over.
  void finish_backward();
  /// It threw.
  void abandon_backward();

  /// The nodes of the use's outputs are about to run. Whether they are the first of the use in this backward.
  [[nodiscard]] bool begin(UnitUse& use);
  void input_sent(UnitUse& use, std::size_t input);   ///< a node of the unit that hands the input a gradient has run
  void input_whole(UnitUse& use, std::size_t input);  ///< the input has all of its gradient
  /// Ends the uses whose last node has run, now that the backward comes to `node`; null: to one that nobody knows.
  void finish_younger_than(const torch::autograd::Node* node);
  /// The last gradient of a unit comes: what others have had by now is all that they get.
  void end_gradients_before(int unit);
  /// Gives the unit's parameters back if nothing of it is left to run.
  void finish_unit(int unit);

 private:
  /// A use of a unit whose backward has begun and is not known to be over.
  struct Running {
    Invocation use;
    std::uint64_t first_node;
    int graph_task;
  };
  /// Ends those whose last node has run, now that the backward comes to a node that is older than those of
  /// `younger(running)`.
  template <class Younger>
  void finish_earlier(const Younger& younger);
  /// Ends those running uses that `over(running)` is true for, the last one first.
  template <class Over>
  void finish_uses(const Over& over);
  [[nodiscard]] bool awaits_earlier_use(const Invocation& use) const;
  [[nodiscard]] int& active(int unit) { return active_uses_[static_cast<std::size_t>(unit)]; }

  zeroth::Engine* core_ = nullptr;
  std::uint64_t number_ = 0;
  std::vector<int> active_uses_;  // per unit, in this backward
  std::vector<Running> running_;
  std::vector<std::vector<std::weak_ptr<const UnitUse>>>
      awaited_;                   // per unit, in order, those of which no backward has begun
  std::uint64_t last_begun_ = 0;  // number of the forward of a unit that began last
};

}  // namespace zeroth::libtorch
