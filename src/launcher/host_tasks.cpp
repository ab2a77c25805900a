#include "launcher/host_tasks.h"

#include "launcher/environment.h"
#include "launcher/messages.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

namespace zeroth::launcher {
namespace {

constexpr std::string_view kDevices = "CUDA_VISIBLE_DEVICES";
constexpr std::array<std::string_view, 14> kHostBound{"DBUS_SESSION_BUS_ADDRESS",
                                                      "DISPLAY",
                                                      "HOSTNAME",
                                                      "OLDPWD",
                                                      "PWD",
                                                      "SHLVL",
                                                      "STY",
                                                      "TMUX",
                                                      "TMUX_PANE",
                                                      "WAYLAND_DISPLAY",
                                                      "XAUTHORITY",
                                                      "XDG_RUNTIME_DIR",
                                                      "ZEROTH_RDZV_SECRET",
                                                      "_"};

std::string_view name_of(std::string_view assignment) {
  return assignment.substr(0, assignment.find('='));
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return parts;
}

/// The devices of the slots that a filter has named.
std::string devices_of(const HostSelection& host, const std::optional<std::string>& given) {
  std::vector<std::string> chosen;
  const std::vector<std::string> devices = given ? split(*given) : std::vector<std::string>{};
  for (const int slot : host.slots) {
    if (given && static_cast<std::size_t>(slot) >= devices.size()) {
      throw Error(ErrorCode::kUsage, "a slot is chosen that has no device",
                  {.which = fmt::format("slot {} of host {}", slot, host.name),
                   .expected = fmt::format("below {}, the devices of {}", devices.size(), kDevices),
                   .got = *given,
                   .hint = "choose other slots, or unset the variable"});
    }
    chosen.push_back(given ? devices[static_cast<std::size_t>(slot)] : std::to_string(slot));
  }
  return join(chosen, ",");
}

/// As --num_gpus of DeepSpeed: the first `wanted` slots of every host.
void use_some_of_each(std::vector<HostSelection>& hosts, std::size_t wanted) {
  for (HostSelection& host : hosts) {
    if (host.slots.size() < wanted) {
      throw Error(
          ErrorCode::kUsage, "a host has fewer slots than ranks are wanted on each",
          {.which = "host " + host.name,
           .expected = fmt::format("at least {} slots", wanted),
           .got = std::to_string(host.slots.size()),
           .hint = fmt::format("give it more (slots={0} in a hostfile, {1}:{0} in --hosts), or start fewer ranks",
                               wanted, host.name)});
    }
    host.slots.resize(wanted);
  }
}

}  // namespace

std::string describe_hosts(const Options& options, const std::vector<HostSelection>& hosts) {
  const std::size_t ranks = hosts.front().slots.size();
  const bool even =
      std::ranges::all_of(hosts, [ranks](const HostSelection& host) { return host.slots.size() == ranks; });
  std::size_t total = 0;
  for (const HostSelection& host : hosts) total += host.slots.size();
  const std::string count = fmt::format("{} host{}", hosts.size(), hosts.size() == 1 ? "" : "s");
  const std::string source = options.hostfile.empty() ? "--hosts" : "hostfile " + options.hostfile;
  return even ? fmt::format("{} x {} rank{} = {} ({})", count, ranks, ranks == 1 ? "" : "s", total, source)
              : fmt::format("{}, {} ranks ({})", count, total, source);
}

std::vector<HostSelection> hosts_of(const Options& options) {
  const auto entries = options.hostfile.empty() ? parse_host_list(options.hosts)
                                                : parse_hostfile(read_hostfile(options.hostfile), options.hostfile);
  std::vector<HostSelection> hosts = select_hosts(entries, options.include, options.exclude);
  if (options.ranks_per_host > 0) use_some_of_each(hosts, static_cast<std::size_t>(options.ranks_per_host));
  std::size_t slots = 0;
  for (const HostSelection& host : hosts) slots += host.slots.size();
  const std::size_t wanted = options.num_ranks == 0 ? slots : static_cast<std::size_t>(options.num_ranks);
  if (wanted > slots || wanted > kMaxRanks) {
    throw Error(ErrorCode::kUsage, "the number of ranks does not fit the hosts",
                {.which = "-n",
                 .expected = fmt::format("at most {} slots, and {}", slots, kMaxRanks),
                 .got = std::to_string(wanted),
                 .hint = wanted > slots ? "give the hosts more slots, or start fewer ranks" : "start fewer ranks"});
  }
  std::size_t left = wanted;
  for (HostSelection& host : hosts) {
    host.slots.resize(std::min(host.slots.size(), left));
    left -= host.slots.size();
  }
  std::erase_if(hosts, [](const HostSelection& host) { return host.slots.empty(); });
  return hosts;
}

std::vector<HostTask> share_out(const Options& options, const std::vector<HostSelection>& hosts, const JobFacts& job,
                                const std::vector<std::string>& environment) {
  std::vector<HostTask> tasks;
  int first_rank = 0;
  for (const HostSelection& host : hosts) {
    HostTask task{.job = job,
                  .node = static_cast<int>(tasks.size()),
                  .first_rank = first_rank,
                  .num_ranks = static_cast<int>(host.slots.size()),
                  .command = options.command,
                  .environment = environment,
                  .extra = options.environment,
                  .bind = options.bind};
    if (host.slots_named) {
      task.extra.emplace_back(kDevices, devices_of(host, value_of(task, kDevices)));
    }
    first_rank += task.num_ranks;
    tasks.push_back(std::move(task));
  }
  return tasks;
}

bool is_host_bound(std::string_view name) {
  return name.starts_with("SSH_") || !valid_variable_name(name) ||
         std::ranges::find(kHostBound, name) != kHostBound.end();
}

std::vector<std::string> carried(const std::vector<std::string>& environment, std::vector<std::string>& left_out) {
  std::vector<std::string> result;
  for (const std::string& entry : environment) {
    if (is_host_bound(name_of(entry))) {
      left_out.emplace_back(name_of(entry));
    } else {
      result.push_back(entry);
    }
  }
  std::ranges::sort(left_out);
  return result;
}

void complete_environment(HostTask& task, const std::vector<std::string>& own) {
  for (const std::string& entry : own) {
    if (is_host_bound(name_of(entry)) && name_of(entry) != "PWD" && name_of(entry) != "ZEROTH_RDZV_SECRET")
      task.environment.push_back(entry);
  }
  if (!task.directory.empty()) task.environment.push_back("PWD=" + task.directory);
}

}  // namespace zeroth::launcher
