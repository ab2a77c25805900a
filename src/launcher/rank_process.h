// One rank as the launcher holds it: a process group with the rank as its leader.
#pragma once

#include <zeroth/base/preemption.h>

#include <sys/types.h>

#include <optional>
#include <utility>

namespace zeroth::launcher {

struct ExitStatus {
  int exit_code = 0;
  int signal = 0;  ///< 0 when the process exited by itself
  bool core_dumped = false;

  [[nodiscard]] bool ok() const { return exit_code == 0 && signal == 0; }
  /// It has made room (zeroth/base/preemption.h): no failure.
  [[nodiscard]] bool preempted() const { return exit_code == kExitPreempted && signal == 0; }
};

/// Owns a child process that leads its own process group.
/// Signals go to numbers, and a number is only safe while its process has not been reaped: the leader
/// therefore stays a zombie until `end_group` has sent the last signal. That also makes pidfds unnecessary,
/// which some sandboxes do not have. Destruction ends the whole group with SIGKILL and waits for the leader.
class RankProcess {
 public:
  explicit RankProcess(pid_t pid) noexcept : pid_(pid) {}
  RankProcess(RankProcess&& other) noexcept : pid_(other.pid_), leader_(std::exchange(other.leader_, false)) {}
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;
  RankProcess& operator=(RankProcess&&) = delete;
  ~RankProcess();

  [[nodiscard]] pid_t pid() const { return pid_; }

  /// To every process of the group; nothing after `end_group`.
  void signal_group(int signal) const noexcept;
  /// To the rank itself only.
  void signal_leader(int signal) const noexcept;

  /// How the rank ended, or nothing while it runs. Never blocks and leaves the zombie in place.
  [[nodiscard]] std::optional<ExitStatus> exit_status() const noexcept;

  /// Ends what is left of the group with SIGKILL and reaps the leader, which must have ended.
  void end_group() noexcept;
  /// After `end_group`: reaps members that became our children; true when none is left. Never blocks.
  [[nodiscard]] bool group_is_gone() const noexcept;
  /// Lets go of a process that not even SIGKILL ends (stuck in the kernel), so that nobody waits for it.
  void abandon() noexcept { leader_ = false; }

 private:
  pid_t pid_;
  bool leader_ = true;  ///< the leader is not reaped yet
};

}  // namespace zeroth::launcher
