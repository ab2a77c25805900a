// What a rank does while it waits, as a transport keeps it: one list for all groups of the rank.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/comm/progress.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace zeroth::detail {

/// Sleeps of waits that nobody can wake for news: of messages, of MPI's and NCCL's calls.
inline constexpr Milliseconds kBusySlice{1};
inline constexpr Milliseconds kIdleSlice{20};

/// One thread at a time, as the groups of a rank.
class ProgressList {
 public:
  /// Until the object goes. A second time it does nothing: groups of one backend may share a list.
  void add(std::weak_ptr<Progress> progress);
  [[nodiscard]] bool empty() const { return entries_.empty(); }
  /// Whether something is under way.
  bool advance();
  void set_awaited(int rank);
  void clear_awaited() noexcept;

 private:
  std::vector<std::weak_ptr<Progress>> entries_;
};

/// One wait. Costs a look at an empty list where nothing is registered.
class WaitProgress {
 public:
  explicit WaitProgress(ProgressList& list) : list_(list) {}
  WaitProgress(const WaitProgress&) = delete;
  WaitProgress& operator=(const WaitProgress&) = delete;
  ~WaitProgress() {
    if (awaits_) list_.clear_awaited();
  }

  [[nodiscard]] bool idle() const { return list_.empty(); }
  /// Between two looks.
  void advance() {
    if (!list_.empty()) [[unlikely]]
      busy_ = list_.advance();
  }
  /// The last look was in vain, and this rank sleeps for `rank`, its number in the job.
  void sleeps_for(int rank) {
    if (list_.empty()) [[likely]]
      return;
    awaits_ = true;
    list_.set_awaited(rank);
  }
  /// How long the wait may sleep where nobody wakes it.
  [[nodiscard]] Milliseconds slice(Milliseconds most) const {
    return list_.empty() ? most : std::min(most, busy_ ? kBusySlice : kIdleSlice);
  }

 private:
  ProgressList& list_;
  bool awaits_ = false;
  bool busy_ = true;  ///< not known before the first advance()
};

}  // namespace zeroth::detail
