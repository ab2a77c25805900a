#include "launcher/head.h"

#include "launcher/addresses.h"
#include "launcher/agent.h"
#include "launcher/assembly.h"
#include "launcher/environment.h"
#include "launcher/host_tasks.h"
#include "launcher/local_group.h"
#include "launcher/remote_group.h"
#include "launcher/spawn.h"
#include "launcher/supervisor.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace zeroth::launcher {
namespace {

void make_log_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    throw Error(ErrorCode::kIo,
                fmt::format("cannot make the directory {}: {}", directory, error.message()),
                {.where = "--log-dir"});
  }
}

HostTask task_of_this_host(const Options& options) {
  const bool has_port =
      std::ranges::any_of(options.environment, [](const auto& pair) { return pair.first == "MASTER_PORT"; });
  return {.job = {.num_ranks = options.num_ranks,
                  .job_id = random_job_id(),
                  .master_port = has_port ? 0 : free_port()},
          .num_ranks = options.num_ranks,
          .command = options.command,
          .environment = current_environment(),
          .extra = options.environment};
}

JobEnd run_here(const Options& options, Console console) {
  StartContext context{
      .inherited = &console.inbox.inherited(),
      .descriptors = reserve_descriptors(options.num_ranks, options.log_directory.empty() ? 2 : 4)};
  Supervisor job(options, console.inbox, console.out, console.err);
  UniqueFd relay_read;
  if (options.forward_stdin) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      throw Error(ErrorCode::kResource, "no pipe for standard input: " + errno_text(errno));
    }
    relay_read.reset(ends[0]);
    context.stdin_fd = relay_read.get();
    job.set_stdin(StdinRelay(STDIN_FILENO, UniqueFd(ends[1])));
  }
  auto group = std::make_unique<LocalGroup>(task_of_this_host(options), context, job);
  if (!options.quiet) {
    for (const std::string& note : group->notes()) job.say(note);
  }
  relay_read.reset();
  job.add(std::move(group));
  return job.run();
}

std::string current_directory() {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::current_path(error);
  if (error) {
    throw Error(ErrorCode::kEnvironment,
                "the current directory has no path: " + error.message(),
                {.where = "zeroth-run"});
  }
  return path.string();
}

/// Rank 0's host as the others reach it.
std::string master_address(const std::vector<HostSelection>& hosts,
                           const std::vector<std::unique_ptr<AgentLink>>& links) {
  if (!is_this_host(hosts.front().name)) {
    return hosts.front().name;
  }
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (is_this_host(hosts[i].name)) continue;
    if (const std::string& seen = links[i]->hello()->head_seen; !seen.empty()) return seen;
    if (const std::string own = address_towards(hosts[i].name); !own.empty()) return own;
    return own_host_name();
  }
  return "127.0.0.1";
}

JobEnd stopped_before_the_start(int signal, const std::function<void(std::string_view)>& say) {
  JobEnd end{.exit_code = 128 + signal,
             .text = fmt::format("stopped by signal {}; nothing was started.", signal)};
  say(end.text);
  return end;
}

JobEnd run_on_hosts(const Options& options, const std::vector<HostSelection>& hosts, Console console) {
  const auto say = [&console](std::string_view text) {
    console.err.queue() += fmt::format("zeroth-run: {}\n", text);
    console.err.flush_some();
  };
  const int per_host =
      3 + 2 * static_cast<int>(options.log_directory.empty() ? 0 : hosts.front().slots.size());
  const AgentProgram program{.ssh = options.ssh,
                             .remote_program = options.remote_program,
                             .descriptors = reserve_descriptors(static_cast<int>(hosts.size()), per_host)};
  std::vector<std::unique_ptr<AgentLink>> links;
  for (const HostSelection& host : hosts)
    links.push_back(start_agent(host.name, program, console.inbox.inherited()));
  if (const int signal = await_agents(links, options.connect_timeout, console.inbox, say); signal != 0) {
    return stopped_before_the_start(signal, say);
  }
  const JobFacts facts{.num_ranks = options.num_ranks,
                       .num_nodes = static_cast<int>(hosts.size()),
                       .job_id = random_job_id(),
                       .master_address = master_address(hosts, links),
                       .master_port = links.front()->hello()->free_port};
  std::vector<std::string> left_out;
  std::vector<HostTask> tasks = share_out(options, hosts, facts, carried(current_environment(), left_out));
  if (!options.quiet && !left_out.empty()) say("not carried to the hosts: " + join(left_out, ", "));
  const std::string directory = current_directory();
  Supervisor job(options, console.inbox, console.out, console.err);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].directory = directory;
    job.add(
        std::make_unique<RemoteGroup>(std::move(links[i]), tasks[i], job, options.lost_after, options.quiet));
  }
  return job.run();
}

}  // namespace

int run_job(const Options& options, Console console) {
  if (!options.log_directory.empty()) make_log_directory(options.log_directory);
  if (!options.several_hosts()) {
    return run_here(options, console).exit_code;
  }
  const std::vector<HostSelection> hosts = hosts_of(options);
  Options sized = options;
  sized.num_ranks = 0;
  for (const HostSelection& host : hosts) sized.num_ranks += static_cast<int>(host.slots.size());
  return run_on_hosts(sized, hosts, console).exit_code;
}

int run_agent_on_standard_streams(SignalInbox& inbox) {
  if (::isatty(STDIN_FILENO) != 0) {
    throw Error(ErrorCode::kUsage,
                "an agent is started by another zeroth-run, not by hand",
                {.which = "--agent", .hint = "zeroth-run --help"});
  }
  UniqueFd in(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  UniqueFd out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  // Whatever else writes to standard output must not fall into the frames.
  if (!in.valid() || !out.valid() || ::dup2(nothing.get(), STDIN_FILENO) < 0 ||
      ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    throw Error(ErrorCode::kResource,
                "no descriptors for an agent: " + errno_text(errno),
                {.where = "zeroth-run --agent"});
  }
  Channel channel(std::move(in), std::move(out), 0);
  const AgentSetup setup{
      .hello = {.version = ZEROTH_VERSION_TEXT,
                .host = own_host_name(),
                .free_port = free_port(),
                .head_seen = ssh_client_address()},
      .complete = [](HostTask& task) { complete_environment(task, current_environment()); }};
  return run_agent(channel, setup, inbox).job ? 0 : exit_code(ErrorCode::kPeerLost);
}

}  // namespace zeroth::launcher
