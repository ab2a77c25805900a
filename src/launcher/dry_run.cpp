#include "launcher/dry_run.h"

#include "launcher/assembly.h"
#include "launcher/delegate.h"
#include "launcher/environment.h"
#include "launcher/host_tasks.h"
#include "launcher/program.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>

#include <utility>

namespace zeroth::launcher {
namespace {

constexpr std::string_view kOthers = "no --launcher was named; mpirun and srun are the others";

/// "rank 3", "ranks 0-1".
std::string name_ranks(int first, int count) {
  return count == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {}-{}", first, first + count - 1);
}

std::string describe_here(const Options& options, const std::vector<std::string>& environment) {
  const Program program = program_of(options.command, environment);
  std::string text;
  std::string place = name_ranks(0, options.num_ranks);
  if (options.num_nodes > 1) {
    text = fmt::format("{} nodes, which meet at {}:{}; zeroth-run is started on each ({})\n", options.num_nodes,
                       options.rendezvous.host, options.rendezvous.port, kOthers);
    place = fmt::format("node {}, {} rank{} after those of the nodes before it,", options.node, options.num_ranks,
                        options.num_ranks == 1 ? "" : "s");
  } else {
    text = fmt::format("1 host x {} rank{}; zeroth-run starts them ({})\n", options.num_ranks,
                       options.num_ranks == 1 ? "" : "s", kOthers);
  }
  if (!options.ranks_note.empty()) text += options.ranks_note + "\n";
  text += fmt::format("{} on this host ({}): {}\n", place, host_name(),
                      shell_text({.command = program.arguments, .environment = options.environment}));
  if (!program.note.empty()) text += program.note + "\n";
  return text;
}

std::string describe_on_hosts(const Options& options, const std::vector<std::string>& environment) {
  const std::vector<HostSelection> hosts = hosts_of(options);
  std::string text =
      fmt::format("{}; zeroth-run starts them by {} ({})\n", describe_hosts(options, hosts), options.ssh, kOthers);
  std::vector<std::string> left_out;
  Program here;
  for (const HostTask& task : share_out(options, hosts, {}, carried(environment, left_out))) {
    const std::string& host = hosts[static_cast<std::size_t>(task.node)].name;
    if (is_this_host(host)) here = program_of(task.command, environment);
    text += fmt::format("{} on {}{}: {}\n", name_ranks(task.first_rank, task.num_ranks), host,
                        is_this_host(host) ? " (this host, without ssh)" : "",
                        shell_text({.command = task.command, .environment = task.extra}));
  }
  if (runs_by_python(options.command)) {
    const std::string active = variable_in(environment, "VIRTUAL_ENV").value_or("");
    text += fmt::format("Python, on each host: {}python3 or python of PATH{}\n",
                        active.empty() ? "" : active + "/bin/python (VIRTUAL_ENV), else ",
                        here.note.empty() ? "" : "; here " + here.note);
  }
  return text;
}

}  // namespace

std::string describe_plan(const Options& options, const std::vector<std::string>& environment) {
  return options.several_hosts() ? describe_on_hosts(options, environment) : describe_here(options, environment);
}

}  // namespace zeroth::launcher
