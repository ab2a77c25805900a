// Signals as data: blocked everywhere, read from one descriptor in the loop.
#pragma once

#include "base/unique_fd.h"

#include <csignal>
#include <vector>

namespace zeroth::launcher {

/// What the launcher changes about its own signals and must give back to the ranks.
struct InheritedSignals {
  sigset_t mask{};
  struct sigaction on_child{};
  struct sigaction on_pipe{};
};

/// Blocks the signals that the launcher handles and turns them into readable data for as long as the process
/// lives. Stop signals that the caller has chosen to ignore (nohup, a shell's background job) stay ignored.
class SignalInbox {
 public:
  /// Throws Error(kResource) when the kernel refuses a signalfd.
  SignalInbox();

  [[nodiscard]] int fd() const { return fd_.get(); }
  [[nodiscard]] const InheritedSignals& inherited() const { return inherited_; }
  /// Signal numbers that have come since the last call, in order; equal ones may be merged. Never blocks.
  [[nodiscard]] std::vector<int> take();

 private:
  InheritedSignals inherited_;
  UniqueFd fd_;
};

}  // namespace zeroth::launcher
