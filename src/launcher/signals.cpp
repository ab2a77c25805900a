#include "launcher/signals.h"

#include <zeroth/base/error.h>

#include <sys/signalfd.h>

#include <array>
#include <cerrno>

namespace zeroth::launcher {
namespace {

constexpr std::array kStopSignals{SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGUSR1, SIGUSR2};

}  // namespace

SignalInbox::SignalInbox() {
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  // An inherited "ignore" would make the kernel reap the ranks before we read how they ended.
  ::sigaction(SIGCHLD, &action, &inherited_.on_child);
  action.sa_handler = SIG_IGN;
  // A reader that has gone is an error of write, not our death.
  ::sigaction(SIGPIPE, &action, &inherited_.on_pipe);

  sigset_t handled;
  sigemptyset(&handled);
  sigaddset(&handled, SIGCHLD);
  for (const int signal : kStopSignals) {
    struct sigaction current{};
    if (::sigaction(signal, nullptr, &current) == 0 && current.sa_handler != SIG_IGN) {
      sigaddset(&handled, signal);
    }
  }
  ::sigprocmask(SIG_BLOCK, &handled, &inherited_.mask);
  fd_.reset(::signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_.valid()) {
    throw Error(ErrorCode::kResource, "cannot receive signals (signalfd): " + errno_text(errno));
  }
}

std::vector<int> SignalInbox::take() {
  std::vector<int> result;
  std::array<signalfd_siginfo, 16> infos{};
  for (;;) {
    const ssize_t bytes = ::read(fd_.get(), infos.data(), sizeof(infos));
    if (bytes <= 0) {
      return result;
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(bytes) / sizeof(infos[0]); ++i) {
      result.push_back(static_cast<int>(infos[i].ssi_signo));
    }
  }
}

}  // namespace zeroth::launcher
