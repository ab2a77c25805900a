// Which hosts a job runs on: a hostfile, a list on the command line, and the filter over both.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

inline constexpr std::size_t kMaxHostfileBytes = std::size_t{16} << 20;
inline constexpr std::size_t kMaxHosts = 65'536;
inline constexpr int kMaxSlots = 1024;

/// One host and how many ranks it can take.
struct HostEntry {
  std::string name{};  ///< a name or an address; IPv6 without brackets, in its shortest form
  int num_slots = 0;   ///< 1 to kMaxSlots

  bool operator==(const HostEntry&) const = default;
};

/// A host with the slots of it that the job uses.
struct HostSelection {
  std::string name{};
  std::vector<int> slots{};  ///< rising, at least one
  bool slots_named = false;  ///< the filter has picked slots of this host by number, all hosts otherwise

  bool operator==(const HostSelection&) const = default;
};

/// Lines "host slots=N"; '#' begins a comment, empty lines count for nothing. A host is a name of letters,
/// digits, '.', '-' and '_' that begins with a letter or digit, or an IPv6 address with or without brackets.
/// Anything else, a host twice, no host at all, and what is beyond the limits above throws Error(kConfig)
/// that says `name`:line:column.
[[nodiscard]] std::vector<HostEntry> parse_hostfile(std::string_view text, const std::string& name);
/// "a:2,b,[fd00::1]:4"; a host without a number has one slot. Throws Error(kUsage) that says
/// --hosts:1:column.
[[nodiscard]] std::vector<HostEntry> parse_host_list(std::string_view text);
/// Text that parse_hostfile reads back.
[[nodiscard]] std::string format_hostfile(const std::vector<HostEntry>& hosts);

/// The whole of a regular file. Throws Error: kIo (not there, not readable), kConfig (no regular file, too
/// large). Never waits for a writer (FIFO).
[[nodiscard]] std::string read_hostfile(const std::string& path);

/// DeepSpeed's --include and --exclude over the hosts of a job; at most one of the two is not empty.
/// NODE[@NODE...], where NODE is HOST or HOST:SLOT[,SLOT...]; IPv6 in brackets. The hosts keep the order that
/// they have in `hosts`. Throws Error(kUsage) for what is not of this form, a host or slot that is not there
/// or is named twice, and when nothing is left.
[[nodiscard]] std::vector<HostSelection> select_hosts(const std::vector<HostEntry>& hosts, std::string_view include,
                                                      std::string_view exclude);

}  // namespace zeroth
