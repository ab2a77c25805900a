// What the kernel says about memory: /proc and the cgroup.
#include <zeroth/device/memory.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
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

}  // namespace

std::uint64_t resident_bytes(std::string_view name) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  std::uint64_t total = 0;
  while (std::getline(maps, line)) {
    const bool header = !line.empty() && line.find('-') < line.find(' ') && line.find("kB") == std::string::npos;
    if (header) {
      inside = line.find(name) != std::string::npos;
    } else if (inside) {
      if (const auto bytes = field_bytes(line, "Rss:")) total += *bytes;
    }
  }
  return total;
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
  const auto limit = read_number("/sys/fs/cgroup/memory.max");
  const auto used = read_number("/sys/fs/cgroup/memory.current");
  if (limit && used) available = std::min(available, *limit - std::min(*limit, *used));
  return available;
}

}  // namespace zeroth
