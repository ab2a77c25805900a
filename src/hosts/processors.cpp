#include "hosts/processors.h"

#include <fmt/format.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>

namespace zeroth {
namespace {

constexpr int kMaxProcessors = 8192;

int number_in(const std::string& file, int otherwise) {
  std::ifstream stream(file);
  int value = 0;
  return stream >> value ? value : otherwise;
}

/// The folder of a processor has a link node<N>.
int numa_node_of(const std::string& folder) {
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(folder, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("node") && name.size() > 4 && name.find_first_not_of("0123456789", 4) == std::string::npos &&
        name.size() < 10) {
      return std::stoi(name.substr(4));
    }
  }
  return 0;
}

}  // namespace

std::vector<Processor> processors_here() {
  return processors_of(0);
}

std::vector<Processor> processors_of(pid_t process) {
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(kMaxProcessors),
                                                             [](cpu_set_t* mask) { CPU_FREE(mask); });
  const std::size_t bytes = CPU_ALLOC_SIZE(kMaxProcessors);
  std::vector<Processor> result;
  if (!set || ::sched_getaffinity(process, bytes, set.get()) != 0) {
    return result;
  }
  for (int number = 0; number < kMaxProcessors; ++number) {
    if (!CPU_ISSET_S(static_cast<std::size_t>(number), bytes, set.get())) continue;
    const std::string folder = fmt::format("/sys/devices/system/cpu/cpu{}", number);
    result.push_back({.number = number,
                      .node = numa_node_of(folder),
                      .package = number_in(folder + "/topology/physical_package_id", 0),
                      .core = number_in(folder + "/topology/core_id", number)});
  }
  return result;
}

}  // namespace zeroth
