#include "launcher/oom.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>

namespace zeroth::launcher {
namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Calls `take` with every line.
template <typename Take>
void for_lines(std::string_view text, Take&& take) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    take(line);
  }
}

}  // namespace

std::vector<std::string> oom_files(std::string_view cgroups) {
  std::vector<std::string> files;
  for_lines(cgroups, [&files](std::string_view line) {  // ID:CONTROLLERS:PATH, no controllers for v2
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) return;
    const std::string controllers = "," + std::string(line.substr(first + 1, second - first - 1)) + ",";
    const std::string path(line.substr(second + 1));
    const bool is_v1 = controllers.find(",memory,") != std::string::npos;
    if (!is_v1 && controllers != ",,") return;
    const std::string root = is_v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup";
    const std::string name = is_v1 ? "/memory.oom_control" : "/memory.events";
    files.push_back(root + (path == "/" ? "" : path) + name);
    if (path != "/") files.push_back(root + name);
  });
  return files;
}

std::optional<std::int64_t> oom_kills_in(std::string_view text) {
  static constexpr std::string_view kName = "oom_kill ";
  std::optional<std::int64_t> count;
  for_lines(text, [&count](std::string_view line) {
    if (!line.starts_with(kName)) return;
    std::int64_t value = 0;
    if (std::from_chars(line.data() + kName.size(), line.data() + line.size(), value).ec == std::errc{}) count = value;
  });
  return count;
}

std::optional<std::int64_t> count_oom_kills() {
  for (const std::string& file : oom_files(content_of("/proc/self/cgroup"))) {
    if (const auto count = oom_kills_in(content_of(file))) return count;
  }
  return std::nullopt;
}

}  // namespace zeroth::launcher
