// What the kernel says about memory: /proc and the cgroup.
#include "device/proc.h"

#include <zeroth/device/memory.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <functional>
#include <string>

namespace zeroth {
namespace {

/// The kB value of a line such as "Rss:    12 kB", in bytes.
std::optional<std::uint64_t> field_bytes(const std::string& line, std::string_view key) {
  if (!line.starts_with(key)) return std::nullopt;
  const std::size_t first = line.find_first_of("0123456789", key.size());
  if (first == std::string::npos) return std::nullopt;
  std::uint64_t kib = 0;
  const auto [end, error] = std::from_chars(line.data() + first, line.data() + line.size(), kib);
  if (error != std::errc{}) return std::nullopt;
  return kib * 1024;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

/// Sum of Rss over the mappings of this process that `wanted` (begin, end, header line) takes.
std::uint64_t sum_resident(const std::function<bool(std::uintptr_t, std::uintptr_t, const std::string&)>& wanted) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  std::uint64_t total = 0;
  while (std::getline(maps, line)) {
    // A header is "begin-end perms ..." in hexadecimal; every other line begins with a word and a colon.
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    const char* const last = line.data() + line.size();
    const auto first = std::from_chars(line.data(), last, begin, 16);
    if (first.ec == std::errc{} && first.ptr != last && *first.ptr == '-' &&
        std::from_chars(first.ptr + 1, last, end, 16).ec == std::errc{}) {
      inside = wanted(begin, end, line);
    } else if (inside) {
      if (const auto bytes = field_bytes(line, "Rss:")) total += *bytes;
    }
  }
  return total;
}

/// Page cache on the lists that reclaim looks at, from a memory.stat. v1 writes the sums over sub-groups as
/// "total_...".
std::uint64_t reclaimable_bytes(const std::string& folder) {
  std::ifstream stat(folder + "/memory.stat");
  std::string key;
  std::uint64_t value = 0;
  std::uint64_t own = 0;
  std::uint64_t total = 0;
  while (stat >> key >> value) {
    if (key == "inactive_file" || key == "active_file") own += value;
    if (key == "total_inactive_file" || key == "total_active_file") total += value;
  }
  return std::max(own, total);
}

/// What one cgroup leaves, if it has a limit.
std::optional<std::uint64_t> left_in(const std::string& folder, const char* limit_name, const char* used_name) {
  const auto limit = read_number(folder + "/" + limit_name);
  const auto used = read_number(folder + "/" + used_name);
  if (!limit || !used) return std::nullopt;
  const std::uint64_t held = *used - std::min(*used, reclaimable_bytes(folder));
  return *limit - std::min(*limit, held);
}

}  // namespace

std::optional<std::uint64_t> cgroup_left_bytes(const std::string& root, const std::string& own_groups) {
  std::optional<std::uint64_t> least;
  const auto walk = [&least](const std::string& base, std::string path, const char* limit, const char* used) {
    // From the group of this process up to the root: each level may have a limit. In a container the path may name
    // what is not mounted; then only the root is there, which is the container's own group.
    while (true) {
      if (const auto left = left_in(base + path, limit, used)) least = std::min(least.value_or(*left), *left);
      if (path.empty()) return;
      const std::size_t slash = path.rfind('/');
      path.resize(slash == std::string::npos ? 0 : slash);
    }
  };
  std::ifstream groups(own_groups);
  std::string line;
  std::string unified;
  std::string legacy;
  while (std::getline(groups, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers == ",,") unified = path;
    if (controllers.find(",memory,") != std::string::npos) legacy = path;
  }
  walk(root, unified, "memory.max", "memory.current");
  walk(root + "/memory", legacy, "memory.limit_in_bytes", "memory.usage_in_bytes");
  return least;
}

std::uint64_t resident_bytes(std::string_view name) {
  return sum_resident([name](std::uintptr_t, std::uintptr_t, const std::string& header) {
    return header.find(name) != std::string::npos;
  });
}

std::uint64_t Arena::resident_bytes() const {
  const auto from = reinterpret_cast<std::uintptr_t>(bytes_.data());
  return sum_resident([from, to = from + capacity()](std::uintptr_t begin, std::uintptr_t end, const std::string&) {
    return begin >= from && end <= to && begin < end;
  });
}

std::uint64_t pss_bytes(int pid) {
  std::ifstream rollup("/proc/" + (pid == 0 ? std::string("self") : std::to_string(pid)) + "/smaps_rollup");
  std::string line;
  while (std::getline(rollup, line)) {
    if (const auto bytes = field_bytes(line, "Pss:")) return *bytes;
  }
  return 0;
}

std::uint64_t available_memory_bytes() {
  std::uint64_t available = ~std::uint64_t{0};
  std::ifstream info("/proc/meminfo");
  std::string line;
  while (std::getline(info, line)) {
    if (const auto bytes = field_bytes(line, "MemAvailable:")) available = *bytes;
  }
  if (const auto left = cgroup_left_bytes("/sys/fs/cgroup", "/proc/self/cgroup"))
    available = std::min(available, *left);
  return available;
}

}  // namespace zeroth
