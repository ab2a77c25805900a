// ProcessLiveness: liveness of the other processes of a job. One thread per rank: it beats this rank's heart
// and listens to the others.
#pragma once

#include "base/unique_fd.h"
#include "comm/shm/peers.h"

#include <zeroth/base/deadline.h>
#include <zeroth/comm/system_calls.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::detail {

/// Death is seen through a pidfd, at once; a freeze through heartbeat words that no longer grow and the state
/// in /proc.
///
/// [Note: Own sleep] A rank that was itself stopped, or starved of processor time, must not take the others
/// for frozen. So silence is the sum of this thread's own ticks during which the peer's heartbeat stood
/// still, each counted as at most twice its length; and a process that the kernel does not call stopped has
/// three times as long.
class ProcessLiveness final : public Liveness {
 public:
  /// `controls` must stay mapped as long as this lives. Throws kResource if pidfd_open is refused. A
  /// process that is gone already counts as dead.
  ProcessLiveness(int rank, std::vector<JobControl*> controls, std::vector<pid_t> pids, Milliseconds frozen_after,
                  SystemCalls& system);
  ~ProcessLiveness() override;

  [[nodiscard]] std::string identity(int world_rank) const override;
  [[nodiscard]] std::string death(int world_rank) const override;
  [[nodiscard]] std::string freeze(int world_rank) const override;

 private:
  struct Peer {
    pid_t pid = 0;
    UniqueFd pidfd{};
    std::uint64_t last_beat = 0;  // its thread only
    std::atomic<std::int64_t> silent_ms{0};
    std::atomic<bool> dead{false};
    std::string death{};  // written before dead
  };

  void run();
  void tick(Milliseconds elapsed);
  void mark_dead(Peer& peer);

  int rank_;
  std::vector<JobControl*> controls_;
  Milliseconds frozen_after_;
  std::vector<std::unique_ptr<Peer>> peers_;
  pid_t owner_;  ///< the process in which the thread runs
  UniqueFd stop_;
  std::thread thread_;
};

/// State letter of a process from /proc ('R', 'S', 'T', 'Z', ...), '?' if it cannot be read.
[[nodiscard]] char process_state(pid_t pid);
/// "was killed by SIGKILL (signal 9)", "exited with code 3", or "has ended" where the system does not tell.
[[nodiscard]] std::string process_end(pid_t pid, int pidfd);

}  // namespace zeroth::detail
