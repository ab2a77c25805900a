#include "doctor/judge.h"

#include "doctor/units.h"
#include "hosts/rank_list.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace zeroth::doctor {
namespace {

/// Of a sorted list: the middle one, the upper of two.
template <typename T>
T middle_of(std::vector<T> values) {
  std::ranges::sort(values);
  return values.empty() ? T{} : values[values.size() / 2];
}

/// A latency that nobody notices is not odd.
constexpr double kLatencySlackUs = 100;

struct Kind {
  std::string transport;
  bool far;
  auto operator<=>(const Kind&) const = default;
};

std::string name_of_end(const Report& report, int rank) {
  return fmt::format("rank {} ({})", rank, report.name_of_host(report.host_of(rank)));
}

/// The ends of a link as people call them.
std::string name_of_link(const Report& report, const Link& link) {
  if (report.host_of(link.a) == report.host_of(link.b)) {
    return fmt::format("ranks {} and {} on {}", link.a, link.b, report.name_of_host(report.host_of(link.a)));
  }
  return fmt::format("{} and {}", name_of_end(report, link.a), name_of_end(report, link.b));
}

/// Hosts of which every link of a kind is odd, where they have several and another host has one that is not.
std::set<std::pair<std::string, int>> odd_hosts(const Report& report, const std::vector<std::size_t>& odd) {
  std::map<std::pair<std::string, int>, std::pair<int, int>> counts;  // odd ones, all
  const auto count = [&](const Link& link, bool is_odd) {
    if (!link.far) return;
    for (const int rank : {link.a, link.b}) {
      auto& [of_odd, of_all] = counts[{link.transport, report.host_of(rank)}];
      of_odd += is_odd ? 1 : 0;
      of_all += 1;
    }
  };
  for (std::size_t i = 0; i < report.links.size(); ++i) count(report.links[i], std::ranges::find(odd, i) != odd.end());
  std::set<std::pair<std::string, int>> hosts;
  std::set<std::string> with_good;
  for (const auto& [key, numbers] : counts) {
    if (numbers.first < numbers.second) with_good.insert(key.first);
    if (numbers.first == numbers.second && numbers.second > 1) hosts.insert(key);
  }
  std::erase_if(hosts, [&](const auto& key) { return !with_good.contains(key.first); });
  return hosts;
}

Finding slow_link(const Report& report, const Link& link, const Usual& usual, const Thresholds& thresholds) {
  const double slowest = std::min(link.there_bytes_per_s, link.back_bytes_per_s);
  const bool narrow = figure_of(link) < thresholds.slow_link * usual.bytes_per_s;
  const bool to_b = link.there_bytes_per_s < link.back_bytes_per_s;
  Finding finding{.code = ErrorCode::kEnvironment, .message = narrow ? "a link is slow" : "a link takes long"};
  finding.context = {
      .where = "link over " + link.transport,
      .who = name_of_link(report, link),
      .expected = narrow ? fmt::format("{} as usual here", rate_text(usual.bytes_per_s))
                         : fmt::format("{} as usual here", latency_text(usual.latency_us)),
      .got = narrow ? fmt::format("{} from rank {} to rank {}, {} back", rate_text(slowest), to_b ? link.a : link.b,
                                  to_b ? link.b : link.a,
                                  rate_text(std::max(link.there_bytes_per_s, link.back_bytes_per_s)))
                    : latency_text(link.latency_us),
      .hint = link.far ? "look at the cable, the switch port and the interface of these hosts; until then leave one "
                         "out (--exclude)"
                       : "another program on these cores, or ranks on different sockets (zeroth-run --bind-cores on)"};
  return finding;
}

void judge_links(Report& report, const Thresholds& thresholds) {
  const std::vector<std::size_t> odd = odd_links(report, thresholds);
  const auto hosts = odd_hosts(report, odd);
  for (const std::size_t index : odd) {
    const Link& link = report.links[index];
    report.findings.push_back(slow_link(report, link, usual_of(report, link.transport, link.far), thresholds));
  }
  for (const auto& [transport, host] : hosts) {
    report.findings.push_back({.code = ErrorCode::kEnvironment,
                               .message = "all links of one host are slow",
                               .context = {.where = "links over " + transport,
                                           .who = report.name_of_host(host),
                                           .hint = "its own cable, interface or driver is to blame, not the network"}});
  }
  for (const Link& link : report.links) {
    if (link.error.empty()) continue;
    report.findings.push_back({.code = ErrorCode::kLaunch,
                               .message = "two ranks do not reach each other",
                               .context = {.where = "link over " + link.transport,
                                           .who = name_of_link(report, link),
                                           .got = link.error,
                                           .hint = link.far ? "a firewall between these hosts, or the wrong interface"
                                                            : "see RESOURCE in the documentation's errors"}});
  }
}

/// The odd ones of a text that all ranks should have alike.
void judge_versions(Report& report, const char* what, const std::function<std::string(const RankFacts&)>& value,
                    bool note) {
  std::vector<std::string> values;
  for (const RankFacts& facts : report.ranks) values.push_back(value(facts));
  const std::vector<std::size_t> odd = odd_ones_out(values);
  if (odd.empty()) return;
  std::size_t common = 0;
  while (std::ranges::find(odd, common) != odd.end()) ++common;
  const bool most = 2 * odd.size() < values.size();
  const std::string with = most ? "as on most ranks" : fmt::format("as on rank {}", report.ranks[common].rank);
  // One line a host: its ranks have the same files.
  std::map<std::pair<int, std::string>, std::vector<std::string>> ranks;
  for (const std::size_t index : odd)
    ranks[{report.ranks[index].host, values[index]}].push_back(std::to_string(report.ranks[index].rank));
  for (const auto& [key, numbers] : ranks) {
    report.findings.push_back(
        {.note = note,
         .code = ErrorCode::kMismatch,
         .message = fmt::format("another {} than elsewhere", what),
         .context = {.where = report.name_of_host(key.first),
                     .who = (numbers.size() > 1 ? "ranks " : "rank ") + join(numbers, ", "),
                     .expected = values[common].empty() ? "none, " + with : values[common] + " " + with,
                     .got = key.second.empty() ? "none" : key.second,
                     .hint = note ? "" : fmt::format("install the same {} on every host", what)}});
  }
}

/// One line for the ranks of a host that have the same story.
void judge_lost(Report& report) {
  std::map<std::tuple<int, std::string, std::string>, std::vector<int>> stories;
  for (const LostRank& lost : report.lost) stories[{lost.host, lost.expected, lost.got}].push_back(lost.rank);
  for (auto& [story, ranks] : stories) {
    const auto& [host, expected, got] = story;
    std::ranges::sort(ranks);
    report.findings.push_back(
        {.code = ErrorCode::kLaunch,
         .message = ranks.size() > 1 ? "ranks do not answer" : "a rank does not answer",
         .context = {.where = host < 0 ? "" : report.name_of_host(host),
                     .who = (ranks.size() > 1 ? "ranks " : "rank ") + describe_ranks(ranks),
                     .expected = expected,
                     .got = got,
                     .hint = report.hosts.size() > 1
                                 ? "a firewall, the wrong interface, or a name that leads to loopback (/etc/hosts)"
                                 : ""}});
  }
}

void judge_host(Report& report, const RankFacts& facts) {
  const std::string where = report.name_of_host(facts.host);
  const std::string who = fmt::format("rank {}", facts.rank);
  const auto add = [&](bool note, ErrorCode code, const std::string& message, ErrorContext context) {
    context.where = where;
    context.who = who;
    report.findings.push_back({.note = note, .code = code, .message = message, .context = std::move(context)});
  };
  if (!facts.memfd.empty()) {
    add(false, ErrorCode::kResource, "memfd_create is refused",
        {.got = facts.memfd,
         .hint = "allow it in the container's seccomp profile: ranks of a host share memory through it"});
  }
  if (!facts.pidfd.empty()) {
    add(false, ErrorCode::kResource, "pidfd_open is refused",
        {.got = facts.pidfd,
         .hint = "allow it in the container's seccomp profile: ranks notice the end of others through it"});
  }
  if (facts.open_files >= 0 && facts.open_files < 1024) {
    add(false, ErrorCode::kResource, "few open files are allowed",
        {.expected = "1024 or more", .got = std::to_string(facts.open_files), .hint = "ulimit -n"});
  }
  const bool has_device = !facts.devices.empty();
  if (facts.memlock >= 0 && has_device) {
    add(true, ErrorCode::kResource, "locked memory is limited",
        {.expected = "unlimited, for pinned memory and RDMA",
         .got = format_bytes(static_cast<std::uint64_t>(facts.memlock)),
         .hint = "ulimit -l unlimited"});
  }
  if (facts.shm_bytes < (std::uint64_t{1} << 30U)) {
    add(true, ErrorCode::kResource, "/dev/shm is small",
        {.expected = "1.00 GiB or more, for workers of data loaders and MPI; Zeroth itself does not use it",
         .got = format_bytes(facts.shm_bytes),
         .hint = "docker run --shm-size"});
  }
}

void judge_names(Report& report, const RankFacts& facts) {
  if (report.hosts.size() < 2 || facts.name_leads_to.empty()) return;
  report.findings.push_back(
      {.note = facts.interface_chosen,
       .code = ErrorCode::kLaunch,
       .message = "a host's own name leads to loopback",
       .context = {.where = report.name_of_host(facts.host),
                   .which = facts.host_name,
                   .expected = "an address that the other hosts reach",
                   .got = facts.name_leads_to,
                   .hint = fmt::format(
                       "correct /etc/hosts on {}, or set GLOO_SOCKET_IFNAME: programs that advertise the address of "
                       "their own name (gloo) cannot be reached",
                       facts.host_name)}});
}

void judge_disks(Report& report, const Thresholds& thresholds) {
  for (const DiskFacts& disk : report.disks) {
    const ErrorContext context{.where = report.name_of_host(disk.host), .which = disk.folder};
    if (!disk.error.empty()) {
      Finding finding{.code = ErrorCode::kIo, .message = "a file cannot be written and read back", .context = context};
      finding.context.got = disk.error;
      finding.context.hint = "make room, or choose another folder with --folder";
      report.findings.push_back(std::move(finding));
    } else if (disk.free < thresholds.free_disk_bytes) {
      Finding finding{.code = ErrorCode::kIo, .message = "a disk is nearly full", .context = context};
      finding.context.expected = format_bytes(thresholds.free_disk_bytes) + " free or more (--min-free-gib)";
      finding.context.got = format_bytes(disk.free);
      finding.context.hint = "make room, or choose another folder with --folder";
      report.findings.push_back(std::move(finding));
    }
  }
}

/// Who is off: the clocks against the middle one, so that rank 0's may be the odd one.
void judge_clocks(Report& report, const Thresholds& thresholds) {
  std::vector<double> all;
  for (const ClockFacts& clock : report.clocks) all.push_back(clock.ahead_ms);
  // Of two clocks nobody knows which is right; rank 0's counts.
  const double usual = all.size() > 2 ? middle_of(all) : 0;
  for (const ClockFacts& clock : report.clocks) {
    const double off = clock.ahead_ms - usual;
    if (std::abs(off) <= thresholds.skew_ms + clock.uncertainty_ms) continue;
    report.findings.push_back(
        {.code = ErrorCode::kEnvironment,
         .message = "a clock is wrong",
         .context = {.where = report.name_of_host(clock.host),
                     .expected = fmt::format("within {:.0f} ms of the others", thresholds.skew_ms),
                     .got = fmt::format("{:.0f} ms {}", std::abs(off), off > 0 ? "ahead" : "behind"),
                     .hint = "start chrony or ntpd there; logs and certificates go by it"}});
  }
}

}  // namespace

Usual usual_of(const Report& report, std::string_view transport, bool far) {
  struct Best {
    double bytes_per_s = 0;
    double latency_us = 0;
  };
  std::map<int, Best> ends;
  for (const Link& link : report.links) {
    if (link.transport != transport || link.far != far || !link.error.empty()) continue;
    for (const int rank : {link.a, link.b}) {
      const auto [end, is_new] = ends.try_emplace(far ? report.host_of(rank) : rank);
      Best& best = end->second;
      best.bytes_per_s = std::max({best.bytes_per_s, link.there_bytes_per_s, link.back_bytes_per_s});
      best.latency_us = is_new ? link.latency_us : std::min(best.latency_us, link.latency_us);
    }
  }
  std::vector<double> rates;
  std::vector<double> latencies;
  for (const auto& [end, best] : ends) {
    rates.push_back(best.bytes_per_s);
    latencies.push_back(best.latency_us);
  }
  return {.bytes_per_s = middle_of(rates), .latency_us = middle_of(latencies), .ends = static_cast<int>(ends.size())};
}

double figure_of(const Link& link) {
  return link.far ? std::min(link.there_bytes_per_s, link.back_bytes_per_s)
                  : std::max(link.there_bytes_per_s, link.back_bytes_per_s);
}

std::vector<std::size_t> odd_links(const Report& report, const Thresholds& thresholds) {
  std::map<Kind, Usual> usual;
  std::vector<std::size_t> odd;
  for (std::size_t i = 0; i < report.links.size(); ++i) {
    const Link& link = report.links[i];
    if (!link.error.empty()) continue;
    const auto [entry, is_new] = usual.try_emplace({link.transport, link.far});
    if (is_new) entry->second = usual_of(report, link.transport, link.far);
    const bool narrow = figure_of(link) < thresholds.slow_link * entry->second.bytes_per_s;
    const bool late = link.latency_us > entry->second.latency_us + kLatencySlackUs &&
                      link.latency_us * thresholds.slow_link > entry->second.latency_us;
    if (narrow || late) odd.push_back(i);
  }
  return odd;
}

std::vector<std::size_t> odd_ones_out(const std::vector<std::string>& values) {
  std::map<std::string, std::size_t> counts;
  for (const std::string& value : values) ++counts[value];
  std::string usual = values.empty() ? "" : values.front();
  for (const auto& [value, count] : counts) {
    if (count > counts[usual]) usual = value;
  }
  std::vector<std::size_t> odd;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] != usual) odd.push_back(i);
  }
  return odd;
}

void judge(Report& report, const Thresholds& thresholds) {
  judge_versions(report, "Zeroth", [](const RankFacts& facts) { return facts.zeroth; }, false);
  judge_versions(report, "MPI", [](const RankFacts& facts) { return facts.mpi; }, false);
  judge_versions(report, "NCCL", [](const RankFacts& facts) { return facts.nccl; }, false);
  judge_versions(report, "CUDA driver", [](const RankFacts& facts) { return facts.cuda; }, false);
  judge_versions(report, "glibc", [](const RankFacts& facts) { return facts.glibc; }, true);
  judge_versions(report, "kernel", [](const RankFacts& facts) { return facts.kernel; }, true);
  judge_versions(
      report, "number of devices", [](const RankFacts& facts) { return std::to_string(facts.devices.size()); }, true);
  judge_lost(report);
  std::set<int> seen;
  for (const RankFacts& facts : std::vector<RankFacts>(report.ranks)) {
    if (!seen.insert(facts.host).second) continue;
    judge_host(report, facts);
    judge_names(report, facts);
  }
  judge_disks(report, thresholds);
  judge_clocks(report, thresholds);
  judge_links(report, thresholds);
}

}  // namespace zeroth::doctor
