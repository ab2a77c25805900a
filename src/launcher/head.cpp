#include "launcher/head.h"

#include "hosts/secret.h"
#include "launcher/addresses.h"
#include "launcher/agent.h"
#include "launcher/environment.h"
#include "launcher/host_job.h"
#include "launcher/host_tasks.h"
#include "launcher/job_log.h"
#include "launcher/node_job.h"
#include "launcher/own_ranks.h"
#include "launcher/supervisor.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>
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
    throw Error(ErrorCode::kIo, fmt::format("cannot make the directory {}: {}", directory, error.message()),
                {.where = "--log-dir", .hint = "give a folder that can be made or written"});
  }
}

using Starter = std::function<JobEnd(const Attempt&)>;

/// How this job is started, once or again.
Starter starter_of(const Options& options, const Console& console) {
  if (options.num_nodes > 1) {
    const std::string secret = read_secret(options.secret_file);
    if (const std::string warning = warning_of_secret(options.secret_file); !warning.empty()) console.say(warning);
    if (options.node > 0) return [=, &console](const Attempt&) { return run_as_node(options, secret, console); };
    return [=, &console](const Attempt& attempt) { return run_with_nodes(options, secret, console, attempt); };
  }
  if (!options.several_hosts()) {
    return [=, &console](const Attempt& attempt) { return run_here(options, console, attempt); };
  }
  const std::vector<HostSelection> hosts = hosts_of(options);
  Options sized = options;
  sized.num_ranks = 0;
  for (const HostSelection& host : hosts) sized.num_ranks += static_cast<int>(host.slots.size());
  return [=, &console](const Attempt& attempt) { return run_on_hosts(sized, hosts, console, attempt); };
}

}  // namespace

int run_job(const Options& options, const Console& console) {
  const bool is_head = options.node == 0;
  if (is_head && !options.log_directory.empty()) make_log_directory(options.log_directory);
  JobLog log = is_head && !options.json_file.empty() ? JobLog(options.json_file) : JobLog();
  const Starter start = starter_of(options, console);
  if (!options.ranks_note.empty() && !options.quiet) console.say(options.ranks_note);
  Attempt attempt{.log = &log};
  if (options.timeout) attempt.timeout = {.length = *options.timeout, .at = SteadyClock::now() + *options.timeout};
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
    if (const std::string failure = log.take_failure(); !failure.empty()) console.say(failure);
    if (!end.restart) {
      return end.exit_code;
    }
    const std::string site = options.site < 0 ? "" : fmt::format("site {}: ", options.site);
    if (is_head) console.say(fmt::format("{}restart {} of {}", site, attempt.restart + 1, options.max_restarts));
  }
}

int run_agent_on_standard_streams(SignalInbox& inbox) {
  if (::isatty(STDIN_FILENO) != 0) {
    throw Error(ErrorCode::kUsage, "an agent is started by another zeroth-run, not by hand",
                {.which = "--agent", .hint = "zeroth-run --help"});
  }
  UniqueFd in(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  UniqueFd out(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  // Whatever else writes to standard output must not fall into the frames.
  if (!in.valid() || !out.valid() || ::dup2(nothing.get(), STDIN_FILENO) < 0 ||
      ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    throw Error(ErrorCode::kResource, "no descriptors for an agent: " + errno_text(errno),
                {.where = "zeroth-run --agent"});
  }
  Channel channel(std::move(in), std::move(out), 0);
  const AgentSetup setup{.hello = {.version = ZEROTH_VERSION_TEXT,
                                   .host = host_name(),
                                   .free_port = free_port(),
                                   .ssh_connection = variable_or_empty("SSH_CONNECTION").substr(0, kMaxName)},
                         .complete = [](HostTask& task) { complete_environment(task, current_environment()); }};
  return run_agent(channel, setup, inbox).job ? 0 : exit_code(ErrorCode::kPeerLost);
}

}  // namespace zeroth::launcher
