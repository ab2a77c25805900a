#include "launcher/rank_process.h"

#include <sys/wait.h>

#include <cerrno>
#include <csignal>

namespace zeroth::launcher {

RankProcess::~RankProcess() {
  if (leader_) {
    end_group();
  }
}

void RankProcess::signal_group(int signal) const noexcept {
  if (leader_) {
    ::kill(-pid_, signal);
  }
}

void RankProcess::signal_leader(int signal) const noexcept {
  if (leader_) {
    ::kill(pid_, signal);
  }
}

std::optional<ExitStatus> RankProcess::exit_status() const noexcept {
  siginfo_t info{};
  if (!leader_ || ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  if (info.si_code == CLD_EXITED) {
    return ExitStatus{.exit_code = info.si_status};
  }
  return ExitStatus{.signal = info.si_status, .core_dumped = info.si_code == CLD_DUMPED};
}

void RankProcess::end_group() noexcept {
  if (!leader_) {
    return;
  }
  ::kill(-pid_, SIGKILL);
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 && errno == EINTR) {
  }
  leader_ = false;
}

bool RankProcess::group_is_gone() const noexcept {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_PGID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG) != 0) {
      return errno == ECHILD;
    }
    if (info.si_pid == 0) {
      return false;
    }
  }
}

}  // namespace zeroth::launcher
