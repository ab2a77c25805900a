#include "launcher/own_ranks.h"

#include "launcher/addresses.h"
#include "launcher/environment.h"
#include "launcher/local_group.h"
#include "launcher/spawn.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <string_view>
#include <utility>

namespace zeroth::launcher {
namespace {

/// Where a failing rank writes why, and its last calls.
constexpr std::string_view kRecords = "ZEROTH_TRACE_DIR";

}  // namespace

std::vector<std::string> environment_of_ranks(const Options& options) {
  std::vector<std::string> environment = current_environment();
  if (options.num_nodes > 0) {
    std::erase_if(environment, [](const std::string& entry) { return entry.starts_with("ZEROTH_RDZV_SECRET="); });
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

void add_own_ranks(Supervisor& job, const Options& options, const Console& console, HostTask task, rlimit descriptors) {
  task.command = options.command;
  task.environment = environment_of_ranks(options);
  task.extra = options.environment;
  task.bind = options.bind;
  // Ranks of other hosts may not have the folder.
  if (!options.log_directory.empty() && !value_of(task, kRecords)) {
    task.extra.emplace_back(kRecords, std::filesystem::absolute(options.log_directory).string());
  }
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

JobEnd run_here(const Options& options, const Console& console, const Attempt& attempt) {
  const JobFacts facts{.num_ranks = options.num_ranks,
                       .job_id = random_job_id(),
                       .master_port = port_for_master(options),
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  const rlimit descriptors = reserve_for_ranks(options);
  Supervisor job(options, console, attempt);
  attempt.log->start(facts.num_ranks, options.command, {host_name()});
  add_own_ranks(job, options, console, {.job = facts, .num_ranks = options.num_ranks}, descriptors);
  return job.run();
}

}  // namespace zeroth::launcher
