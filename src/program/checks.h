// The parts of the verifier. Each looks at one rule and takes for granted what the parts before it hold.
#pragma once

#include "program/structure.h"

#include <zeroth/program/verify.h>

#include <array>
#include <optional>
#include <vector>

namespace zeroth {

inline constexpr std::size_t kActionKinds = static_cast<std::size_t>(ActionKind::kStep) + 1;

/// Where the actions of every (chunk, micro-batch) stand in the list of the chunk's rank.
class ActionIndex {
 public:
  explicit ActionIndex(const StepProgram& program);
  /// Position in its rank's list, -1 if it is not there. Of an action that stands there twice, the first.
  [[nodiscard]] int position(ActionKind kind, int chunk, int micro_batch) const {
    return at(chunk, micro_batch)[static_cast<std::size_t>(kind)];
  }
  /// B, else I; -1 without them.
  [[nodiscard]] int gradient(int chunk, int micro_batch) const;
  /// The first action that stands there twice, as (first, second).
  [[nodiscard]] const std::vector<Refutation::Place>& twice() const { return twice_; }

 private:
  using Positions = std::array<int, kActionKinds>;
  [[nodiscard]] const Positions& at(int chunk, int micro_batch) const {
    return positions_[static_cast<std::size_t>(chunk) * micro_batches_ + static_cast<std::size_t>(micro_batch)];
  }
  std::size_t micro_batches_;
  std::vector<Positions> positions_;
  std::vector<Refutation::Place> twice_;
};

/// A place of this action, or of the end of the rank's list if `index` is -1.
[[nodiscard]] Refutation::Place place_of(const StepProgram& program, int rank, int index);

/// Every chunk has F of every micro-batch. Before the index: what it allocates is then bounded by the program's length.
[[nodiscard]] std::optional<Refutation> refute_forwards(const StepProgram& program);
/// F, then B or I, then W, each once, with what it needs there before it.
[[nodiscard]] std::optional<Refutation> refute_order(const StepProgram& program, const ActionIndex& index,
                                                     bool forwards_only);
/// Sends and receives in pairs and in the same order.
[[nodiscard]] std::optional<Refutation> refute_messages(const StepProgram& program, const ActionIndex& index);
/// Ranks that wait for each other.
[[nodiscard]] std::optional<Refutation> refute_deadlock(const StepProgram& program);
/// UNSHARD and RESHARD, REDUCE and STEP.
[[nodiscard]] std::optional<Refutation> refute_states(const StepProgram& program);
/// The bound of held activations.
[[nodiscard]] std::optional<Refutation> refute_in_flight(const StepProgram& program, const std::vector<int>& bounds);

}  // namespace zeroth
