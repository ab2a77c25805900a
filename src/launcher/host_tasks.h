// Shares the ranks of a job out over its hosts.
#pragma once

#include "hosts/hostfile.h"
#include "launcher/host_task.h"
#include "launcher/options.h"

#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// The hosts of the options with the slots that are used: all that the filter leaves, or the first `-n` of
/// them, or the first `ranks_per_host` of each. Throws Error: kIo, kConfig, kUsage.
[[nodiscard]] std::vector<HostSelection> hosts_of(const Options& options);

/// "2 hosts x 8 ranks = 16 (hostfile hosts)". At least one host.
[[nodiscard]] std::string describe_hosts(const Options& options, const std::vector<HostSelection>& hosts);

/// What each host runs, ranks in the order of the hosts. CUDA_VISIBLE_DEVICES is as given; where the filter
/// names slots of a host, those of the devices given, or the slots themselves. Throws Error(kUsage) for a
/// slot beyond the devices given.
[[nodiscard]] std::vector<HostTask> share_out(const Options& options, const std::vector<HostSelection>& hosts,
                                              const JobFacts& job, const std::vector<std::string>& environment);

/// Variables that belong to a host or a login: not carried to other hosts. Also names that no shell could
/// set.
[[nodiscard]] bool is_host_bound(std::string_view name);
/// The rest of an environment; `left_out` gets the names of those that were there and are not carried.
[[nodiscard]] std::vector<std::string> carried(const std::vector<std::string>& environment,
                                               std::vector<std::string>& left_out);
/// What an agent adds to the environment that came: its own host-bound variables, and PWD.
void complete_environment(HostTask& task, const std::vector<std::string>& own);

}  // namespace zeroth::launcher
