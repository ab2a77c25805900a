#include "bench/io_choice.h"

#include <zeroth/base/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>

namespace zeroth::bench {
namespace {

nlohmann::ordered_json row(const IoTiming& timing) {
  return {{"engine", timing.engine},
          {"block_bytes", timing.block_bytes},
          {"depth", timing.depth},
          {"read_bytes_per_s", timing.read_bytes_per_s},
          {"write_bytes_per_s", timing.write_bytes_per_s}};
}

std::uint64_t memory_of(const IoTiming& timing) {
  return timing.block_bytes * static_cast<std::uint64_t>(timing.depth);
}

}  // namespace

double balanced(const IoTiming& timing) {
  return 2 / (1 / timing.read_bytes_per_s + 1 / timing.write_bytes_per_s);
}

const IoTiming& propose(std::span<const IoTiming> timings, double slack) {
  ZR_ASSERT(!timings.empty(), "a proposal from no timing");
  const double fastest = balanced(*std::ranges::max_element(timings, {}, balanced));
  const IoTiming* chosen = nullptr;
  for (const IoTiming& timing : timings) {
    if (balanced(timing) < fastest * (1 - slack)) continue;
    if (chosen == nullptr || memory_of(timing) < memory_of(*chosen)) chosen = &timing;
  }
  return *chosen;
}

std::string to_json(std::span<const IoTiming> timings, const IoTiming& proposal, std::span<const std::string> folders,
                    const std::string& access) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const IoTiming& timing : timings) rows.push_back(row(timing));
  const nlohmann::ordered_json document{{"zeroth_io", 1},
                                        {"folders", std::vector<std::string>(folders.begin(), folders.end())},
                                        {"access", access},
                                        {"rows", rows},
                                        {"proposal", row(proposal)}};
  return document.dump(1) + "\n";
}

}  // namespace zeroth::bench
