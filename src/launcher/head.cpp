#include "launcher/head.h"

#include "launcher/addresses.h"
#include "launcher/agent.h"
#include "launcher/assembly.h"
#include "launcher/environment.h"
#include "launcher/host_tasks.h"
#include "launcher/local_group.h"
#include "launcher/remote_group.h"
#include "launcher/rendezvous.h"
#include "launcher/secret.h"
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
#include <functional>
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

/// Ranks are not told the secret of the nodes.
std::vector<std::string> environment_of_ranks(const Options& options) {
  std::vector<std::string> environment = current_environment();
  if (options.num_nodes > 0) {
    std::erase_if(environment,
                  [](const std::string& entry) { return entry.starts_with("ZEROTH_RDZV_SECRET="); });
  }
  return environment;
}

int port_for_master(const Options& options) {
  const bool chosen =
      std::ranges::any_of(options.environment, [](const auto& pair) { return pair.first == "MASTER_PORT"; });
  return chosen ? 0 : free_port();
}

rlimit reserve_for_ranks(const Options& options) {
  return reserve_descriptors(options.num_ranks, options.log_directory.empty() ? 2 : 4);
}

/// The first ranks of a job as children of this process.
void add_own_ranks(
    Supervisor& job, const Options& options, const Console& console, HostTask task, rlimit descriptors) {
  task.command = options.command;
  task.environment = environment_of_ranks(options);
  task.extra = options.environment;
  task.bind = options.bind;
  StartContext context{.inherited = &console.inbox.inherited(), .descriptors = descriptors};
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
  auto group = std::make_unique<LocalGroup>(task, context, job);
  if (!options.quiet) {
    for (const std::string& note : group->notes()) job.say(note);
  }
  job.add(std::move(group));
}

JobEnd run_here(const Options& options, Console console, const Attempt& attempt) {
  const JobFacts facts{.num_ranks = options.num_ranks,
                       .job_id = random_job_id(),
                       .master_port = port_for_master(options),
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  const rlimit descriptors = reserve_for_ranks(options);
  Supervisor job(options, console, attempt);
  attempt.log->start(facts.num_ranks, options.command, {own_host_name()});
  add_own_ranks(job, options, console, {.job = facts, .num_ranks = options.num_ranks}, descriptors);
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

auto sayer(const Console& console) {
  return [&console](std::string_view text) {
    console.err.queue() += fmt::format("zeroth-run: {}\n", text);
    console.err.flush_some();
  };
}

JobEnd run_on_hosts(const Options& options,
                    const std::vector<HostSelection>& hosts,
                    Console console,
                    const Attempt& attempt) {
  const auto say = sayer(console);
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
                       .master_port = links.front()->hello()->free_port,
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  std::vector<std::string> left_out;
  std::vector<HostTask> tasks = share_out(options, hosts, facts, carried(current_environment(), left_out));
  if (!options.quiet && !left_out.empty()) say("not carried to the hosts: " + join(left_out, ", "));
  const std::string directory = current_directory();
  std::vector<std::string> names;
  for (const HostSelection& host : hosts) names.push_back(host.name);
  attempt.log->start(facts.num_ranks, options.command, names);
  Supervisor job(options, console, attempt);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].directory = directory;
    tasks[i].lost_after_ms = static_cast<int>(options.lost_after.count());
    job.add(
        std::make_unique<RemoteGroup>(std::move(links[i]), tasks[i], job, options.lost_after, options.quiet));
  }
  return job.run();
}

RendezvousSpec spec_of(const Options& options, const std::string& secret) {
  return {.endpoint = options.rendezvous,
          .num_nodes = options.num_nodes,
          .secret = secret,
          .timeout = options.connect_timeout,
          .lost_after = options.lost_after};
}

/// Node 0: its own ranks, and those of the nodes that come.
JobEnd run_with_nodes(const Options& options,
                      const std::string& secret,
                      Console console,
                      const Attempt& attempt) {
  const auto say = sayer(console);
  Rendezvous rendezvous(spec_of(options, secret));
  try {
    if (const int signal = rendezvous.gather(console.inbox, say); signal != 0) {
      const JobEnd end = stopped_before_the_start(signal, say);
      rendezvous.dismiss(end);
      return end;
    }
  } catch (const Error& error) {
    rendezvous.dismiss({.exit_code = exit_code(error.code()), .text = error.what()});
    throw;
  }
  std::vector<std::unique_ptr<AgentLink>> links = rendezvous.take_links();
  Options sized = options;
  for (const auto& link : links) sized.num_ranks += link->hello()->num_ranks;
  if (sized.num_ranks > kMaxRanks) {
    throw Error(ErrorCode::kUsage,
                "the nodes bring too many ranks",
                {.expected = fmt::format("at most {}", kMaxRanks), .got = std::to_string(sized.num_ranks)});
  }
  const JobFacts facts{.num_ranks = sized.num_ranks,
                       .num_nodes = options.num_nodes,
                       .job_id = random_job_id(),
                       .master_address = options.rendezvous.host,
                       .master_port = port_for_master(options),
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  const rlimit descriptors = reserve_for_ranks(sized);
  Supervisor job(sized, console, attempt);
  std::vector<std::string> names{own_host_name()};
  for (const auto& link : links) names.push_back(link->host());
  attempt.log->start(facts.num_ranks, options.command, names);
  HostTask task{.job = facts,
                .first_rank = options.num_ranks,
                .lost_after_ms = static_cast<int>(options.lost_after.count())};
  for (std::unique_ptr<AgentLink>& link : links) {
    ++task.node;
    task.num_ranks = link->hello()->num_ranks;
    job.add(std::make_unique<RemoteGroup>(std::move(link), task, job, options.lost_after, options.quiet));
    task.first_rank += task.num_ranks;
  }
  add_own_ranks(job, sized, console, {.job = facts, .num_ranks = options.num_ranks}, descriptors);
  return job.run();
}

/// Another node: what the head says, run here with this node's own command and environment.
JobEnd run_as_node(const Options& options, const std::string& secret, Console console) {
  const auto say = sayer(console);
  const std::unique_ptr<Channel> channel = join_job(spec_of(options, secret), console.inbox, say);
  if (!channel) {
    return {.exit_code = 128 + SIGTERM, .text = "stopped before the start"};
  }
  const AgentSetup setup{.hello = {.version = ZEROTH_VERSION_TEXT,
                                   .host = own_host_name(),
                                   .num_ranks = options.num_ranks,
                                   .node = options.node,
                                   .num_nodes = options.num_nodes},
                         .complete =
                             [&options](HostTask& task) {
                               task.job.master_address = options.rendezvous.host;
                               task.command = options.command;
                               task.environment = environment_of_ranks(options);
                               task.extra = options.environment;
                               task.bind = options.bind;
                             },
                         // The head waits for other nodes, for as long as it likes, and pings.
                         .lost_after = options.lost_after};
  const AgentEnd end = run_agent(*channel, setup, console.inbox);
  if (!end.job) {
    throw Error(ErrorCode::kPeerLost,
                "the head of the job has gone; the ranks of this node were ended",
                {.where = "--rdzv"});
  }
  if (!end.job->text.empty()) say(end.job->text);
  return *end.job;
}

using Starter = std::function<JobEnd(const Attempt&)>;

/// How this job is started, once or again.
Starter starter_of(const Options& options, Console console) {
  if (options.num_nodes > 1) {
    const std::string secret = read_secret(options.secret_file);
    if (options.node > 0) return [=](const Attempt&) { return run_as_node(options, secret, console); };
    return [=](const Attempt& attempt) { return run_with_nodes(options, secret, console, attempt); };
  }
  if (!options.several_hosts()) {
    return [=](const Attempt& attempt) { return run_here(options, console, attempt); };
  }
  const std::vector<HostSelection> hosts = hosts_of(options);
  Options sized = options;
  sized.num_ranks = 0;
  for (const HostSelection& host : hosts) sized.num_ranks += static_cast<int>(host.slots.size());
  return [=](const Attempt& attempt) { return run_on_hosts(sized, hosts, console, attempt); };
}

}  // namespace

int run_job(const Options& options, Console console) {
  const bool is_head = options.node == 0;
  if (is_head && !options.log_directory.empty()) make_log_directory(options.log_directory);
  JobLog log = is_head && !options.json_file.empty() ? JobLog(options.json_file) : JobLog();
  const Starter start = starter_of(options, console);
  Attempt attempt{.log = &log};
  if (options.timeout) attempt.timeout_at = SteadyClock::now() + *options.timeout;
  const auto say = sayer(console);
  for (;; ++attempt.restart) {
    log.set_restart(attempt.restart);
    JobEnd end;
    try {
      end = start(attempt);
    } catch (const Error& error) {
      log.end({.exit_code = exit_code(error.code()), .text = error.what()});
      throw;
    }
    log.end(end);
    if (const std::string failure = log.take_failure(); !failure.empty()) say(failure);
    if (!end.restart) {
      return end.exit_code;
    }
    if (is_head) say(fmt::format("restart {} of {}", attempt.restart + 1, options.max_restarts));
  }
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
