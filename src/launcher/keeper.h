// Who ends the ranks' processes when the launcher cannot: it was killed.
#pragma once

#include "base/unique_fd.h"

#include <sys/types.h>

namespace zeroth::launcher {

/// A small process beside this one, of a session of its own. The kernel ends a rank whose launcher dies, but not what
/// the rank has started: this one hears of the launcher's death by the end of a pipe, and ends the groups that it
/// watches with SIGKILL. A process that has left its rank's group (setsid) lives on.
class Keeper {
 public:
  /// To be made while this process has one thread. Throws Error(kResource).
  Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;
  /// Ends the process, and no group.
  ~Keeper();

  void watch(pid_t group) const noexcept { tell(group); }
  /// Before the leader is reaped, for then its number may soon be another's.
  void forget(pid_t group) const noexcept { tell(-group); }

 private:
  void tell(pid_t word) const noexcept;

  UniqueFd pipe_;
  pid_t pid_ = -1;
};

}  // namespace zeroth::launcher
