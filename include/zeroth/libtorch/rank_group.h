// RankGroup: the ranks that a layer of a model shares its work with.
#pragma once

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace zeroth::libtorch {

class SumSlots;

/// A Communicator, and what an error in backward is turned into. Cheap to copy; copies share the group. A graph of
/// autograd keeps the groups of its nodes.
class RankGroup {
 public:
  /// Throws an Error, or another exception of the front end's that stands for it; may return.
  using Rethrow = std::function<void(const Error&)>;

  /// `rethrow`: for errors of a backward, which torch carries to the caller of backward(); unset: as they are.
  RankGroup(Communicator communicator, Rethrow rethrow = nullptr)  // NOLINT: a Communicator is one
      : communicator_(std::move(communicator)), rethrow_(std::move(rethrow)) {}

  [[nodiscard]] int rank() const { return communicator_.rank(); }
  [[nodiscard]] int size() const { return communicator_.size(); }
  [[nodiscard]] const std::string& name() const { return communicator_.backend().group_name(); }
  /// "rank 1/4 of world/mesh0/tp"
  [[nodiscard]] std::string who() const {
    return "rank " + std::to_string(rank()) + "/" + std::to_string(size()) + " of " + name();
  }
  [[nodiscard]] const Communicator& communicator() const { return communicator_; }
  [[nodiscard]] const Rethrow& rethrow() const { return rethrow_; }
  /// Memory for reduce_from_group_async(), made by its first call. Copies share it; other RankGroups of the same
  /// Communicator have their own, so hold one RankGroup a group.
  [[nodiscard]] std::shared_ptr<SumSlots>& sum_slots() const { return state_->sum_slots; }

  /// The first error of a call. Its ranks are at different places since then, and no later call is made. Any thread.
  [[nodiscard]] std::optional<Error> left() const {
    const std::lock_guard lock(state_->mutex);
    return state_->left;
  }
  void leave(const Error& error) const {
    const std::lock_guard lock(state_->mutex);
    if (!state_->left) state_->left.emplace(error);
  }

 private:
  Communicator communicator_;
  Rethrow rethrow_;
  struct State {
    std::shared_ptr<SumSlots> sum_slots{};
    std::mutex mutex{};
    std::optional<Error> left{};  ///< under mutex
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace zeroth::libtorch
