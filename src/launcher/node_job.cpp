#include "launcher/node_job.h"

#include "launcher/agent.h"
#include "launcher/environment.h"
#include "launcher/own_ranks.h"
#include "launcher/remote_group.h"
#include "launcher/rendezvous.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <utility>
#include <vector>

namespace zeroth::launcher {
namespace {

Say sayer(const Console& console) {
  return [&console](std::string_view text) { console.say(text); };
}

RendezvousSpec spec_of(const Options& options, const std::string& secret) {
  return {.endpoint = options.rendezvous,
          .num_nodes = options.num_nodes,
          .secret = secret,
          .timeout = options.connect_timeout,
          .lost_after = options.lost_after};
}

}  // namespace

JobEnd run_with_nodes(const Options& options, const std::string& secret, const Console& console,
                      const Attempt& attempt) {
  Rendezvous rendezvous(spec_of(options, secret));
  try {
    if (const int signal = rendezvous.gather(console.inbox, sayer(console), attempt.timeout); signal != 0) {
      const JobEnd end = stopped_before_the_start(signal, console);
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
    throw Error(ErrorCode::kUsage, "the nodes bring too many ranks",
                {.expected = fmt::format("at most {}", kMaxRanks), .got = std::to_string(sized.num_ranks)});
  }
  // The name may lead to loopback here. The other nodes have connected to it, and keep it.
  const std::string& reached = rendezvous.reached_at();
  const JobFacts facts{.num_ranks = sized.num_ranks,
                       .num_nodes = options.num_nodes,
                       .job_id = random_job_id(),
                       .master_address = reached.empty() ? options.rendezvous.host : reached,
                       .master_port = port_for_master(options),
                       .restart = attempt.restart,
                       .max_restarts = options.max_restarts};
  const rlimit descriptors = reserve_for_ranks(sized);
  Supervisor job(sized, console, attempt);
  std::vector<std::string> names{host_name()};
  for (const auto& link : links) names.push_back(link->host());
  attempt.log->start(facts.num_ranks, options.command, names);
  HostTask task{
      .job = facts, .first_rank = options.num_ranks, .lost_after_ms = static_cast<int>(options.lost_after.count())};
  for (std::unique_ptr<AgentLink>& link : links) {
    ++task.node;
    task.num_ranks = link->hello()->num_ranks;
    job.add(std::make_unique<RemoteGroup>(std::move(link), task, job, options.lost_after, options.quiet));
    task.first_rank += task.num_ranks;
  }
  add_own_ranks(job, sized, console, {.job = facts, .num_ranks = options.num_ranks}, descriptors);
  return job.run();
}

JobEnd run_as_node(const Options& options, const std::string& secret, const Console& console) {
  const std::unique_ptr<Channel> channel = join_job(spec_of(options, secret), console.inbox, sayer(console));
  if (!channel) {
    return {.exit_code = 128 + SIGTERM, .text = "stopped before the start"};
  }
  const AgentSetup setup{.hello = {.version = ZEROTH_VERSION_TEXT,
                                   .host = host_name(),
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
                         .preempt_grace = options.preempt_grace,
                         // The head waits for other nodes, for as long as it likes, and pings.
                         .lost_after = options.lost_after};
  const AgentEnd end = run_agent(*channel, setup, console.inbox);
  if (!end.job) {
    throw Error(ErrorCode::kPeerLost, "the head of the job has gone; the ranks of this node were ended",
                {.where = "--rdzv"});
  }
  if (!end.job->text.empty()) console.say(end.job->text);
  return *end.job;
}

}  // namespace zeroth::launcher
