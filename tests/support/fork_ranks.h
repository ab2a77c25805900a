// Ranks as forked processes: run a function in each, collect how they ended, kill what is left at the
// deadline.
#pragma once

#include "support/rank_report.h"

#include <zeroth/base/deadline.h>

#include <sys/types.h>

#include <functional>
#include <vector>

namespace zeroth::test {

struct ProcessEnd {
  int rank = 0;
  pid_t pid = 0;
  int wait_status = 0;  ///< as of waitpid()
  bool killed_at_deadline = false;
  std::chrono::milliseconds after{};  ///< since the fork
};

struct ForkReport : RankReport {
  std::vector<ProcessEnd> ends{};  ///< by rank
};

struct ForkRanksOptions {
  Milliseconds deadline{60'000};
  /// Called once in the parent, in a loop with the time since the fork, until it returns false: sends
  /// signals, say.
  std::function<bool(const std::vector<pid_t>& pids, Milliseconds since)> meanwhile{};
};

/// Forks `world` children that run body(rank) and _exit: with 0, or with 1 and a text if it throws. The
/// caller must have no threads. A child dies with its parent. Failures: exceptions, signals, exit codes, the
/// deadline. What they leave behind (left_behind.h) fails the test that runs.
[[nodiscard]] ForkReport fork_ranks(int world, const std::function<void(int rank)>& body,
                                    const ForkRanksOptions& options = {});

/// A name for the shm rendezvous that no other test run has.
[[nodiscard]] std::string unique_job();

/// Number of open descriptors of this process.
[[nodiscard]] int open_descriptors();

}  // namespace zeroth::test
