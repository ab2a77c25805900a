// What a job would start, without starting it.
#pragma once

#include "launcher/options.h"

#include <string>
#include <vector>

namespace zeroth::launcher {

/// Lines: who starts the ranks, then one for each host with its ranks and their command as a shell would take it, then
/// which Python it is. `environment`: of this process. On other hosts neither program nor Python is looked for. Throws
/// Error as the job itself would: for hosts, and for a program or Python that is not on this host where it has ranks.
[[nodiscard]] std::string describe_plan(const Options& options, const std::vector<std::string>& environment);

}  // namespace zeroth::launcher
