// The agent: runs the ranks of one host for the head of a job, which may be on another one.
#pragma once

#include "launcher/channel.h"
#include "launcher/host_task.h"
#include "launcher/messages.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <functional>
#include <optional>

namespace zeroth::launcher {

/// So many bytes of output of one agent may be on their way: a head whose reader does not read stops the
/// ranks' output, not their supervision.
inline constexpr std::size_t kOutputWindow = std::size_t{1} << 20;

struct AgentSetup {
  Hello hello{};
  /// What this host itself says of the task, where the head does not (--nnodes); may throw.
  std::function<void(HostTask&)> complete{};
  Milliseconds preempt_grace{30'000};  ///< from SIGTERM to the agent itself to SIGKILL of its ranks
  Milliseconds lost_after{
      10'000};  ///< without a word from the head for so long it has gone; the task says how long from then on
};

/// How it ended, for the agent's own exit.
struct AgentEnd {
  std::optional<JobEnd> job{};  ///< what the head said; none if it has gone
};

/// Says hello, waits for a task, runs its ranks and reports until the head says that the job has ended, or
/// has gone: then the ranks are ended first. Blocks. Throws Error(kLaunch) if what comes is not from a head.
[[nodiscard]] AgentEnd run_agent(Channel& channel, const AgentSetup& setup, SignalInbox& inbox);

}  // namespace zeroth::launcher
