// Brings up an agent on every host of a job before anything is started.
#pragma once

#include "launcher/agent_link.h"
#include "launcher/console.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// How a host is reached.
struct AgentProgram {
  std::string ssh = "ssh";                    ///< a program that is called like ssh
  std::string remote_program = "zeroth-run";  ///< there; characters that no shell takes for its own
  rlimit descriptors{};
};

/// Starts the agent of a host: ssh -o BatchMode=yes -o ConnectTimeout=10 -- HOST REMOTE_PROGRAM --agent, or
/// for this host itself zeroth-run --agent. Nothing else is on a command line; all that a rank gets travels
/// through standard input. Throws what spawn_rank throws.
[[nodiscard]] std::unique_ptr<AgentLink> start_agent(const std::string& host, const AgentProgram& program,
                                                     const InheritedSignals& inherited);
/// localhost, 127.0.0.1, ::1, or this machine's own name.
[[nodiscard]] bool is_this_host(const std::string& host);

/// A host that cannot take part.
struct RefusedHost {
  std::string host{};
  std::string text{};
  bool late = false;  ///< it has not answered, which need not be its fault once another one has failed
};

/// Waits until every agent has said hello. Says every five seconds whom it waits for, and for how long it has
/// waited. Throws Error(kLaunch) that names every host that failed, or is late after `timeout`; once one has
/// failed the others get kOthers. `refused` hears of each of them first. Throws Error(kTimeout) at the end of
/// the job's time. Returns the number of a signal that came instead, or 0.
[[nodiscard]] int await_agents(const std::vector<std::unique_ptr<AgentLink>>& links, Milliseconds timeout,
                               const JobTimeout& job, SignalInbox& inbox,
                               const std::function<void(std::string_view)>& say,
                               const std::function<void(const RefusedHost&)>& refused = {});

inline constexpr Milliseconds kOthers{2000};

}  // namespace zeroth::launcher
