#include "launcher/keeper.h"

#include <zeroth/base/error.h>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <set>

namespace zeroth::launcher {
namespace {

/// Keeps nothing of the launcher's open: who waits for the end of its connections must see it.
void close_all_but_input() {
  if (::syscall(SYS_close_range, 1U, ~0U, 0U) == 0) return;
  for (int fd = 1; fd < static_cast<int>(::sysconf(_SC_OPEN_MAX)); ++fd) ::close(fd);  // before Linux 5.9
}

[[noreturn]] void keep(int pipe) {
  ::setsid();  // whoever signals the launcher's session or group does not mean this one
  ::prctl(PR_SET_NAME, "zeroth-keeper");
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  if (::dup2(pipe, STDIN_FILENO) < 0) ::_exit(1);
  close_all_but_input();
  std::set<pid_t> groups;
  for (pid_t word = 0;;) {
    const ssize_t got = ::read(STDIN_FILENO, &word, sizeof word);
    if (got == static_cast<ssize_t>(sizeof word) && word > 0) {
      groups.insert(word);
    } else if (got == static_cast<ssize_t>(sizeof word)) {
      groups.erase(-word);
    } else if (got >= 0 || errno != EINTR) {
      break;
    }
  }
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  ::_exit(0);
}

}  // namespace

Keeper::Keeper() {
  std::array<int, 2> ends{};
  ZR_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, ErrorCode::kResource,
           "no pipe for the keeper of the ranks: " + errno_text(errno));
  const UniqueFd read_end(ends[0]);
  pipe_ = UniqueFd(ends[1]);
  pid_ = ::fork();
  ZR_CHECK(pid_ >= 0, ErrorCode::kResource, "no process for the keeper of the ranks: " + errno_text(errno),
           {.hint = "the limit of processes (ulimit -u)"});
  if (pid_ == 0) keep(read_end.get());
}

Keeper::~Keeper() {
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Keeper::tell(pid_t word) const noexcept {
  while (::write(pipe_.get(), &word, sizeof word) < 0 && errno == EINTR) {  // a keeper that is gone is no reason to end
  }
}

}  // namespace zeroth::launcher
