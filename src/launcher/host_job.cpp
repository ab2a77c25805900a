#include "launcher/host_job.h"

#include "launcher/addresses.h"
#include "launcher/assembly.h"
#include "launcher/environment.h"
#include "launcher/host_tasks.h"
#include "launcher/remote_group.h"
#include "launcher/spawn.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>
#include <zeroth/base/text.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

namespace zeroth::launcher {
namespace {

std::string current_directory() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::current_path(error);
  if (error) {
    throw Error(ErrorCode::kEnvironment, "the current directory has no path: " + error.message(),
                {.where = "zeroth-run"});
  }
  return path.string();
}

/// Rank 0's host as the others reach it: by an address wherever one is known, for its name leads to loopback on
/// many a host itself.
std::string master_address(const std::vector<HostSelection>& hosts,
                           const std::vector<std::unique_ptr<AgentLink>>& links) {
  if (!is_this_host(hosts.front().name)) {
    const std::string reached = ssh_ends(links.front()->hello()->ssh_connection).server;
    if (!reached.empty() && !is_loopback(reached)) return reached;
    const std::string resolved = address_of(hosts.front().name);
    return resolved.empty() ? hosts.front().name : resolved;
  }
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (is_this_host(hosts[i].name)) continue;
    if (const std::string seen = ssh_ends(links[i]->hello()->ssh_connection).client; !seen.empty()) return seen;
    if (const std::string own = address_towards(hosts[i].name); !own.empty()) return own;
    return host_name();
  }
  return "127.0.0.1";
}

}  // namespace

JobEnd run_on_hosts(const Options& options, const std::vector<HostSelection>& hosts, const Console& console,
                    const Attempt& attempt) {
  const int per_host = 3 + 2 * static_cast<int>(options.log_directory.empty() ? 0 : hosts.front().slots.size());
  const AgentProgram program{.ssh = options.ssh,
                             .remote_program = options.remote_program,
                             .descriptors = reserve_descriptors(static_cast<int>(hosts.size()), per_host)};
  std::vector<std::unique_ptr<AgentLink>> links;
  for (const HostSelection& host : hosts) links.push_back(start_agent(host.name, program, console.inbox.inherited()));
  if (!options.quiet && attempt.restart == 0) console.say(describe_hosts(options, hosts));
  if (const int signal = await_agents(
          links, options.connect_timeout, attempt.timeout, console.inbox,
          [&console](std::string_view text) { console.say(text); },
          [&attempt](const RefusedHost& host) { attempt.log->host_refused(host.host, host.text, host.late); });
      signal != 0) {
    return stopped_before_the_start(signal, console);
  }
  const JobFacts facts{.num_ranks = options.num_ranks,
                       .num_nodes = static_cast<int>(hosts.size()),
                       .job_id = random_job_id(),
                       .master_address = master_address(hosts, links),
                       .master_port = links.front()->hello()->free_port,
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  std::vector<std::string> left_out;
  std::vector<HostTask> tasks = share_out(options, hosts, facts, carried(current_environment(), left_out));
  if (!options.quiet && !left_out.empty()) console.say("not carried to the hosts: " + join(left_out, ", "));
  const std::string directory = current_directory();
  std::vector<std::string> names;
  for (const HostSelection& host : hosts) names.push_back(host.name);
  attempt.log->start(facts.num_ranks, options.command, names);
  Supervisor job(options, console, attempt);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].directory = directory;
    tasks[i].lost_after_ms = static_cast<int>(options.lost_after.count());
    job.add(std::make_unique<RemoteGroup>(std::move(links[i]), tasks[i], job, options.lost_after, options.quiet));
  }
  return job.run();
}

}  // namespace zeroth::launcher
