// The parts of the verifier. Each looks at one rule and takes for granted what the parts before it hold.
#pragma once

#include "program/structure.h"

#include <zeroth/program/verify.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace zeroth {

/// Where the actions of micro-batches stand: those of a chunk in the list of its rank, those of a split output layer in
/// every list.
class ActionIndex {
 public:
  /// Allocates for every pair of chunk and micro-batch: after refute_forwards() and refute_vocabulary_counts().
  explicit ActionIndex(const StepProgram& program);
  /// Position in its rank's list, -1 if it is not there. Of an action that stands there twice, the first.
  [[nodiscard]] int position(ActionKind kind, int chunk, int micro_batch) const {
    return positions_[pair(chunk, micro_batch)][static_cast<std::size_t>(kind)];
  }
  /// B, else I; -1 without them.
  [[nodiscard]] int gradient(int chunk, int micro_batch) const;
  /// Of a split output layer.
  [[nodiscard]] int vocabulary(ActionKind kind, int rank, int micro_batch) const;
  [[nodiscard]] bool has_vocabulary() const { return !vocabulary_.empty(); }
  /// The first action that stands there twice, as (first, second).
  [[nodiscard]] const std::vector<Refutation::Place>& twice() const { return twice_; }

 private:
  static constexpr std::size_t kPairKinds = static_cast<std::size_t>(ActionKind::kRecompute) + 1;
  static constexpr std::size_t kVocabularyKinds = static_cast<std::size_t>(ActionKind::kStep) - kPairKinds;
  [[nodiscard]] std::size_t pair(int first, int micro_batch) const {
    return static_cast<std::size_t>(first) * micro_batches_ + static_cast<std::size_t>(micro_batch);
  }
  int& slot(const Action& action, int rank);

  std::size_t micro_batches_;
  std::vector<std::array<int, kPairKinds>> positions_;
  std::vector<std::array<int, kVocabularyKinds>> vocabulary_{};
  std::vector<Refutation::Place> twice_{};
};

/// A place in a program.
struct Site {
  int rank = -1;
  int index = -1;
  bool operator==(const Site&) const = default;
};

/// What the actions of a program wait for that other ranks do.
class Waits {
 public:
  /// Keeps a reference to both. Throws kUsage for dependences of actions that are not there.
  Waits(const StepProgram& program, const ActionIndex& index, const std::vector<Dependence>& dependences);
  /// Sets `sites` to those that must be over before this action can go on.
  void of(Site site, std::vector<Site>& sites) const;

 private:
  void of_vocabulary(const Action& action, Site site, std::vector<Site>& sites) const;
  void on_all_ranks(ActionKind kind, int micro_batch, std::vector<Site>& sites) const;
  [[nodiscard]] Site site_of(const Action& action) const;

  const StepProgram& program_;
  const ActionIndex& index_;
  std::map<std::pair<int, int>, std::vector<Site>> more_{};  // of (rank, index)
};

/// A place of this action, or of the end of the rank's list if `index` is -1.
[[nodiscard]] Refutation::Place place_of(const StepProgram& program, int rank, int index);

/// Every chunk has F of every micro-batch. Before the index: what it allocates is then bounded by the program's length.
[[nodiscard]] std::optional<Refutation> refute_forwards(const StepProgram& program);
/// A split output layer is there on every rank, or on none.
[[nodiscard]] std::optional<Refutation> refute_vocabulary_counts(const StepProgram& program);
/// F, then B or I, then W, each once, with what it needs there before it.
[[nodiscard]] std::optional<Refutation> refute_order(const StepProgram& program, const ActionIndex& index,
                                                     bool forwards_only);
/// Sends and receives in pairs and in the same order.
[[nodiscard]] std::optional<Refutation> refute_messages(const StepProgram& program, const ActionIndex& index);
/// The order within a split output layer, and of its collectives.
[[nodiscard]] std::optional<Refutation> refute_vocabulary(const StepProgram& program, const ActionIndex& index);
/// Ranks that wait for each other.
[[nodiscard]] std::optional<Refutation> refute_deadlock(const StepProgram& program, const ActionIndex& index,
                                                        const std::vector<Dependence>& dependences);
/// UNSHARD and RESHARD, FETCH and FLUSH of states, REDUCE and STEP.
[[nodiscard]] std::optional<Refutation> refute_states(const StepProgram& program);
/// By how many pairs of chunk and micro-batch this action changes what its rank holds.
[[nodiscard]] int change_of_held(const Action& action);
/// The bound of held activations.
[[nodiscard]] std::optional<Refutation> refute_in_flight(const StepProgram& program, const std::vector<int>& bounds);

}  // namespace zeroth
