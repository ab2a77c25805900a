// The rank's activity as a transport uses it.
#pragma once

#include <zeroth/comm/factory.h>
#include <zeroth/comm/rank_activity.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace zeroth::detail {

/// The control plane has so long to say in better words why a rank has stopped the job, or why one is gone.
inline constexpr Milliseconds kWordOfCause{500};
/// More than the coordinator gathers causes for: who sees the end of a survivor, which has told what it saw, is to hear
/// of the victim.
inline constexpr Milliseconds kWordOfLoss{400};

class Watched {
 public:
  Watched() = default;
  explicit Watched(const CommOptions& options) : activity_(options.activity), ranks_(options.watched_ranks) {}

  /// Null: nobody watches.
  [[nodiscard]] RankActivity* activity() const { return activity_.get(); }
  /// See RankActivity::await_verdict().
  void await_verdict(Milliseconds patience) const {
    if (activity_) activity_->await_verdict(patience);
  }
  /// What two ranks alone can see: the others hear of it where there is a control plane.
  [[noreturn]] void tell_and_throw(const Error& mismatch) const {
    if (activity_) activity_->tell(mismatch);
    throw Error(mismatch);
  }
  /// What the ranks of a group see of each other's calls. `members`: world ranks of the group. Where they are the whole
  /// job, all ranks throw it in the same words, with the lines of their programs, if there is a control plane.
  [[noreturn]] void throw_mismatch(const Error& mismatch, std::span<const int> members) const {
    if (activity_ && is_job(members)) activity_->tell_and_await(activity_->dated(mismatch), kWordOfCause);
    throw Error(mismatch);
  }
  /// See RankActivity::dated().
  [[nodiscard]] Error dated(const Error& error) const { return activity_ ? activity_->dated(error) : error; }
  /// How long a wait may take now.
  [[nodiscard]] Milliseconds patience(Milliseconds timeout) const {
    return activity_ ? activity_->patience(timeout) : timeout;
  }
  /// The job's number of a rank of this world.
  [[nodiscard]] int job_rank(int world_rank) const {
    return ranks_.empty() ? world_rank : ranks_[static_cast<std::size_t>(world_rank)];
  }

 private:
  /// Whether the members have the numbers of the job's ranks, and are all of them.
  [[nodiscard]] bool is_job(std::span<const int> members) const {
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      if (job_rank(members[rank]) != static_cast<int>(rank)) return false;
    }
    return members.size() == static_cast<std::size_t>(activity_->size());
  }

  std::shared_ptr<RankActivity> activity_;
  std::vector<int> ranks_;
};

}  // namespace zeroth::detail
