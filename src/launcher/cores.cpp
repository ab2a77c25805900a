#include "launcher/cores.h"

#include "launcher/line_merger.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <tuple>

namespace zeroth::launcher {
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
  const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(kMaxProcessors),
                                                             [](cpu_set_t* mask) { CPU_FREE(mask); });
  const std::size_t bytes = CPU_ALLOC_SIZE(kMaxProcessors);
  std::vector<Processor> result;
  if (!set || ::sched_getaffinity(0, bytes, set.get()) != 0) {
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

std::vector<std::vector<int>> share_processors(std::vector<Processor> processors, int num_ranks) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  if (processors.size() < ranks) {
    return {};
  }
  const auto place = [](const Processor& one) { return std::tuple(one.node, one.package, one.core); };
  std::ranges::sort(processors, {},
                    [&](const Processor& one) { return std::tuple_cat(place(one), std::tuple(one.number)); });
  // Where each core begins; its threads follow.
  std::vector<std::size_t> begins;
  for (std::size_t i = 0; i < processors.size(); ++i) {
    if (i == 0 || place(processors[i]) != place(processors[i - 1])) begins.push_back(i);
  }
  if (begins.size() < ranks) {
    begins.resize(processors.size());
    for (std::size_t i = 0; i < begins.size(); ++i) begins[i] = i;
  }
  const std::size_t units = begins.size();
  begins.push_back(processors.size());
  std::vector<std::vector<int>> shares(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = begins[rank * units / ranks]; i < begins[(rank + 1) * units / ranks]; ++i) {
      shares[rank].push_back(processors[i].number);
    }
  }
  const std::size_t even = std::ranges::min(shares, {}, &std::vector<int>::size).size();
  for (std::vector<int>& share : shares) {
    share.resize(even);
    std::ranges::sort(share);
  }
  return shares;
}

std::vector<std::vector<int>> plan_binding(BindCores wanted, int num_ranks) {
  if (wanted == BindCores::kOff || (wanted == BindCores::kAuto && num_ranks == 1)) {
    return {};
  }
  const std::vector<Processor> processors = processors_here();
  std::vector<std::vector<int>> shares = share_processors(processors, num_ranks);
  if (shares.empty() && wanted == BindCores::kOn) {
    throw Error(ErrorCode::kUsage, "there is no core for every rank",
                {.which = "--bind-cores on",
                 .expected = fmt::format("at least {} in the affinity mask", num_ranks),
                 .got = std::to_string(processors.size()),
                 .hint = "start fewer ranks, or --bind-cores off"});
  }
  return shares;
}

std::string describe_processors(const std::vector<int>& processors) {
  return describe_ranks(processors);
}

}  // namespace zeroth::launcher
