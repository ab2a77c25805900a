// A job of nodes that are started one by one (--nnodes).
#pragma once

#include "launcher/console.h"
#include "launcher/options.h"
#include "launcher/supervisor.h"

#include <string>

namespace zeroth::launcher {

/// Node 0: its own ranks, and those of the nodes that come. Blocks. Throws Error if the job cannot be
/// started.
[[nodiscard]] JobEnd run_with_nodes(const Options& options, const std::string& secret, const Console& console,
                                    const Attempt& attempt);

/// Another node: what the head says, run here with this node's own command and environment. Blocks. Throws
/// Error: kLaunch, or kPeerLost when the head has gone.
[[nodiscard]] JobEnd run_as_node(const Options& options, const std::string& secret, const Console& console);

}  // namespace zeroth::launcher
