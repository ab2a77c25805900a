// Which cores each rank of a host runs on.
#pragma once

#include "hosts/processors.h"
#include "launcher/host_task.h"

#include <string>
#include <vector>

namespace zeroth::launcher {

/// Processors for each of `num_ranks` ranks, neighbours (NUMA node, package, core) together: whole cores if
/// there is one for each rank, else single threads of cores. Every rank gets as many, because ranks must
/// agree on their threads; what is left over is nobody's. Empty if there are fewer processors than ranks.
[[nodiscard]] std::vector<std::vector<int>> share_processors(std::vector<Processor> processors, int num_ranks);

/// What to do on this host: empty for no binding. A single rank is never bound by kAuto: it has the whole
/// mask as it is. Throws Error(kUsage) if kOn cannot be honoured.
[[nodiscard]] std::vector<std::vector<int>> plan_binding(BindCores wanted, int num_ranks);

/// "0-3,8" of rising numbers.
[[nodiscard]] std::string describe_processors(const std::vector<int>& processors);

}  // namespace zeroth::launcher
