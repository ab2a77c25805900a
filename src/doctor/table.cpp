#include "doctor/table.h"

#include "doctor/units.h"

#include <zeroth/base/text.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

/// What other hosts say is one line each, whatever came.
std::string one_line(std::string text) {
  std::ranges::replace_if(text, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }, ' ');
  return text;
}

std::string row(std::string_view name, const std::string& value) {
  return one_line(fmt::format("  {:<14}{}", name, value)) + "\n";
}

std::string limit_text(std::int64_t limit, bool bytes) {
  return limit < 0 ? "unlimited" : bytes ? format_bytes(static_cast<std::uint64_t>(limit)) : std::to_string(limit);
}

std::string or_none(const std::string& text) {
  return text.empty() ? "none found" : text;
}

std::string text_of_host(const Report& report, const HostEntry& host) {
  const auto first = std::ranges::find(report.ranks, host.host, &RankFacts::host);
  if (first == report.ranks.end()) return "";
  std::vector<std::string> ranks;
  for (const RankFacts& facts : report.ranks) {
    if (facts.host == host.host) ranks.push_back(std::to_string(facts.rank));
  }
  const RankFacts& facts = *first;
  std::string text =
      one_line(fmt::format("host {}{} (rank{} {})", host.name,
                           host.address.empty() || host.address == host.name ? "" : " at " + host.address,
                           ranks.size() > 1 ? "s" : "", join(ranks, ", "))) +
      "\n";
  text += row("versions", fmt::format("zeroth {}, kernel {}, glibc {}", facts.zeroth, facts.kernel, facts.glibc));
  text += row("MPI", or_none(facts.mpi));
  text += row("NCCL", or_none(facts.nccl));
  text += row("CUDA driver", facts.cuda.empty() ? "none found" : "up to CUDA " + facts.cuda);
  text += row("devices", facts.devices.empty() ? "none: CPU"
                                               : fmt::format("{} ({})", facts.devices.size(), facts.devices.front()));
  text +=
      row("processors", fmt::format("{} on {} core{}, {} NUMA node{}", facts.processors, facts.cores,
                                    facts.cores == 1 ? "" : "s", facts.numa_nodes, facts.numa_nodes == 1 ? "" : "s"));
  text +=
      row("memory", fmt::format("{}, {} available{}", format_bytes(facts.memory), format_bytes(facts.memory_available),
                                facts.memory_limit > 0 ? ", cgroup limit " + format_bytes(facts.memory_limit) : ""));
  text +=
      row("shared memory", fmt::format("memfd {}, pidfd {}, /dev/shm {} ({} free)",
                                       facts.memfd.empty() ? "ok" : "refused", facts.pidfd.empty() ? "ok" : "refused",
                                       format_bytes(facts.shm_bytes), format_bytes(facts.shm_free)));
  text += row("limits", fmt::format("open files {}, locked memory {}", limit_text(facts.open_files, false),
                                    limit_text(facts.memlock, true)));
  for (const DiskFacts& disk : report.disks) {
    if (disk.host != host.host) continue;
    text +=
        row("disk", fmt::format("{}: {}", disk.folder,
                                !disk.error.empty()
                                    ? disk.error
                                    : fmt::format("{} free, write {}, read {}, O_DIRECT {}", format_bytes(disk.free),
                                                  rate_text(disk.write_bytes_per_s), rate_text(disk.read_bytes_per_s),
                                                  disk.direct ? "ok" : "not here")));
  }
  for (const ClockFacts& clock : report.clocks) {
    if (clock.host != host.host) continue;
    text +=
        row("clock", fmt::format("{:+.1f} ms against rank 0 (within {:.1f} ms)", clock.ahead_ms, clock.uncertainty_ms));
  }
  return text;
}

std::string text_of_links(const Report& report, const Thresholds& thresholds) {
  if (report.links.empty()) return "";
  const std::vector<std::size_t> odd = odd_links(report, thresholds);
  std::string text = fmt::format("links\n  {:<10}{:<6}{:<9}{:>12}{:>14}{:>14}\n", "ranks", "over", "where", "latency",
                                 "there", "back");
  for (std::size_t i = 0; i < report.links.size(); ++i) {
    const Link& link = report.links[i];
    const std::string head = fmt::format("  {:<10}{:<6}{:<9}", fmt::format("{}-{}", link.a, link.b), link.transport,
                                         link.far ? "between" : "inside");
    text += one_line(!link.error.empty()
                         ? head + "  " + link.error
                         : head + fmt::format("{:>12}{:>14}{:>14}{}", latency_text(link.latency_us),
                                              rate_text(link.there_bytes_per_s), rate_text(link.back_bytes_per_s),
                                              std::ranges::find(odd, i) != odd.end() ? "  <- slow" : "")) +
            "\n";
  }
  std::set<std::pair<std::string, bool>> kinds;
  for (const Link& link : report.links) kinds.insert({link.transport, link.far});
  for (const auto& [transport, far] : kinds) {
    const Usual usual = usual_of(report, transport, far);
    if (usual.ends > 0) {
      text += fmt::format("  usual {} {}: {}, {}\n", far ? "between hosts over" : "inside a host over", transport,
                          latency_text(usual.latency_us), rate_text(usual.bytes_per_s));
    }
  }
  return text;
}

}  // namespace

std::string table_of(const Report& report, const Thresholds& thresholds) {
  std::string text;
  for (const HostEntry& host : report.hosts) text += text_of_host(report, host);
  text += text_of_links(report, thresholds);
  if (!report.advice.empty()) {
    text += "plan\n";
    for (const std::string& line : report.advice) text += "  " + one_line(line) + "\n";
  }
  std::size_t problems = 0;
  for (const bool note : {true, false}) {
    for (const Finding& finding : report.findings) {
      if (finding.note != note) continue;
      text += one_line(fmt::format("{}: {}", note ? "note" : "found", finding.line())) + "\n";
      problems += note ? 0 : 1;
    }
  }
  return text + (problems == 0 ? "all well\n" : fmt::format("{} finding{}\n", problems, problems == 1 ? "" : "s"));
}

}  // namespace zeroth::doctor
