#include "launcher/delegate.h"

#include "launcher/environment.h"
#include "launcher/host_tasks.h"
#include "launcher/program.h"
#include "launcher/spawn.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

namespace zeroth::launcher {
namespace {

[[noreturn]] void refuse(const std::string& launcher, const std::string& message, const std::string& which,
                         const std::string& hint) {
  throw Error(ErrorCode::kUsage, message, {.where = "--launcher " + launcher, .which = which, .hint = hint});
}

/// The hosts, empty for this one.
std::vector<HostSelection> hosts_for(const Options& options) {
  if (!options.several_hosts()) {
    return {};
  }
  std::vector<HostSelection> hosts = hosts_of(options);
  for (const HostSelection& host : hosts) {
    if (host.slots_named) {
      refuse(options.launcher, "single slots cannot be chosen with another launcher", "--include, --exclude",
             "filter whole hosts");
    }
  }
  return hosts;
}

std::size_t ranks_of(const Options& options, const std::vector<HostSelection>& hosts) {
  std::size_t ranks = hosts.empty() ? static_cast<std::size_t>(options.num_ranks) : 0;
  for (const HostSelection& host : hosts) ranks += host.slots.size();
  return ranks;
}

void add_mpirun(Delegation& delegation, const Options& options, const std::vector<HostSelection>& hosts,
                const std::vector<std::string>& environment) {
  std::vector<std::string>& command = delegation.command;
  command = {"mpirun", "-n", std::to_string(ranks_of(options, hosts))};
  if (options.bind != BindCores::kAuto) {
    command.insert(command.end(), {"--bind-to", options.bind == BindCores::kOn ? "core" : "none"});
  }
  std::vector<std::string> places;
  for (const HostSelection& host : hosts) {
    if (host.name.find(':') != std::string::npos)
      refuse("mpirun", "mpirun takes no IPv6 address", host.name, "give the host a name");
    places.push_back(fmt::format("{}:{}", host.name, host.slots.size()));
  }
  if (!places.empty()) {
    command.insert(command.end(), {"-H", join(places, ",")});
    std::vector<std::string> left_out;
    for (const std::string& entry : carried(environment, left_out)) {
      const std::string name = entry.substr(0, entry.find('='));
      const bool of_mpi = name.starts_with("OMPI_") || name.starts_with("PMIX_") || name.starts_with("PRTE_");
      const bool ours =
          std::ranges::any_of(options.environment, [&name](const auto& pair) { return pair.first == name; });
      if (!of_mpi && !ours) command.insert(command.end(), {"-x", name});
    }
  }
  for (const auto& [name, value] : options.environment) command.insert(command.end(), {"-x", name});
}

bool is_set(const std::vector<std::string>& environment, const std::vector<std::pair<std::string, std::string>>& more,
            std::string_view name) {
  return std::ranges::any_of(more, [name](const auto& pair) { return pair.first == name; }) ||
         std::ranges::any_of(environment, [name](std::string_view entry) {
           return entry.starts_with(name) && entry.substr(name.size()).starts_with('=') &&
                  entry.size() > name.size() + 1;
         });
}

void add_srun(Delegation& delegation, const Options& options, const std::vector<HostSelection>& hosts,
              const std::vector<std::string>& environment) {
  std::vector<std::string>& command = delegation.command;
  command = {"srun", fmt::format("--ntasks={}", ranks_of(options, hosts))};
  if (options.bind != BindCores::kAuto) {
    command.push_back(options.bind == BindCores::kOn ? "--cpu-bind=cores" : "--cpu-bind=none");
  }
  if (hosts.empty()) {
    command.emplace_back("--nodes=1");
  } else {
    std::vector<std::string> names;
    for (const HostSelection& host : hosts) {
      if (host.slots.size() != hosts.front().slots.size()) {
        refuse("srun", "srun is told one number of ranks for all hosts", host.name,
               "give every host as many slots, or use -n");
      }
      names.push_back(host.name);
    }
    command.push_back(fmt::format("--nodes={}", hosts.size()));
    command.push_back(fmt::format("--ntasks-per-node={}", hosts.front().slots.size()));
    command.push_back("--nodelist=" + join(names, ","));
  }
  // Slurm's variables do not say that MPI reaches all ranks, so a world of several hosts asks for it
  // (zeroth/engine/world.h); srun has to start them as ranks of MPI then. Who has chosen otherwise keeps that.
  if (hosts.size() > 1) {
    if (!is_set(environment, options.environment, "SLURM_MPI_TYPE")) command.emplace_back("--mpi=pmix");
    if (!is_set(environment, options.environment, "ZEROTH_BACKEND"))
      delegation.environment.emplace_back("ZEROTH_BACKEND", "shm+mpi");
  }
  command.emplace_back("--export=ALL");
}

std::string shell_word(const std::string& word) {
  const bool plain = !word.empty() && std::ranges::all_of(word, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("._+/-=:,@%").find(c) != std::string_view::npos;
  });
  if (plain) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

Delegation delegation_of(const Options& options, const std::vector<std::string>& environment) {
  Delegation delegation{.environment = options.environment};
  const std::vector<HostSelection> hosts = hosts_for(options);
  if (options.launcher == "mpirun") {
    add_mpirun(delegation, options, hosts, environment);
  } else {
    add_srun(delegation, options, hosts, environment);
  }
  // The other launcher looks for no Python: its ranks have that of this host.
  const std::vector<std::string> program =
      runs_by_python(options.command) ? program_of(options.command, environment).arguments : options.command;
  if (program.front().starts_with('-')) {
    refuse(options.launcher, "a program whose name begins with '-' cannot be named to another launcher",
           program.front(), "write ./" + program.front());
  }
  delegation.command.insert(delegation.command.end(), program.begin(), program.end());
  return delegation;
}

std::string shell_text(const Delegation& delegation) {
  std::vector<std::string> words;
  for (const auto& [name, value] : delegation.environment) words.push_back(name + "=" + shell_word(value));
  for (const std::string& word : delegation.command) words.push_back(shell_word(word));
  return join(words, " ");
}

int delegate(const Options& options) {
  const std::vector<std::string> environment = current_environment();
  const Delegation delegation = delegation_of(options, environment);
  const std::string text = shell_text(delegation);
  if (options.dry_run) {
    const std::string line = text + "\n";
    for (std::size_t at = 0; at < line.size();) {
      const ssize_t written = ::write(STDOUT_FILENO, line.data() + at, line.size() - at);
      if (written < 0 && errno != EINTR)
        throw Error(ErrorCode::kIo, "the command cannot be printed: " + errno_text(errno));
      at += static_cast<std::size_t>(std::max<ssize_t>(written, 0));
    }
    return 0;
  }
  const std::string program = find_program(delegation.command.front(), search_path_of(environment));
  if (!options.quiet) {
    const std::string line = "zeroth-run: " + text + "\n";
    (void)!::write(STDERR_FILENO, line.data(), line.size());
  }
  for (const auto& [name, value] : delegation.environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> arguments;
  for (const std::string& word : delegation.command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  ::execv(program.c_str(), arguments.data());
  throw Error(ErrorCode::kLaunch, fmt::format("cannot start {}: {}", program, errno_text(errno)));
}

}  // namespace zeroth::launcher
