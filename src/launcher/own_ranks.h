// The ranks that the head of a job runs itself, and the job that has no others.
#pragma once

#include "launcher/console.h"
#include "launcher/host_task.h"
#include "launcher/options.h"
#include "launcher/supervisor.h"

#include <sys/resource.h>

#include <string>
#include <vector>

namespace zeroth::launcher {

/// Our environment; with nodes without their secret.
[[nodiscard]] std::vector<std::string> environment_of_ranks(const Options& options);
/// MASTER_PORT, 0 if the user has chosen one.
[[nodiscard]] int port_for_master(const Options& options);
/// To be called before log files are opened. Throws Error(kResource).
[[nodiscard]] rlimit reserve_for_ranks(const Options& options);

/// Starts the ranks of `task`, which says no more than who they are, as children of this process. Throws what
/// LocalGroup throws.
void add_own_ranks(Supervisor& job, const Options& options, const Console& console, HostTask task, rlimit descriptors);

/// A job on this host alone. Blocks.
[[nodiscard]] JobEnd run_here(const Options& options, const Console& console, const Attempt& attempt);

}  // namespace zeroth::launcher
