// A job on the hosts of --hostfile or --hosts.
#pragma once

#include "hosts/hostfile.h"
#include "launcher/console.h"
#include "launcher/options.h"
#include "launcher/supervisor.h"

#include <vector>

namespace zeroth::launcher {

/// Starts an agent on every host and supervises the job. `options.num_ranks` counts the slots of `hosts`.
/// Blocks. Throws Error if the job cannot be started.
[[nodiscard]] JobEnd run_on_hosts(const Options& options, const std::vector<HostSelection>& hosts,
                                  const Console& console, const Attempt& attempt);

}  // namespace zeroth::launcher
