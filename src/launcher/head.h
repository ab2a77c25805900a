// The head of a job: from options to an exit code, over as many starts as are allowed.
#pragma once

#include "launcher/console.h"
#include "launcher/options.h"
#include "launcher/signals.h"

namespace zeroth::launcher {

/// Runs the job on this host, on the hosts of the options, or with the nodes that come. Blocks; returns the
/// exit code. Throws Error if it cannot be started.
[[nodiscard]] int run_job(const Options& options, const Console& console);

/// zeroth-run --agent: the ranks of this host, for a head at standard input and output.
[[nodiscard]] int run_agent_on_standard_streams(SignalInbox& inbox);

}  // namespace zeroth::launcher
