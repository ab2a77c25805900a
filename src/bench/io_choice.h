// From measured transfers to a proposal: engine, block size and depth.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth::bench {

/// One engine at one block size and depth.
struct IoTiming {
  std::string engine{};
  std::uint64_t block_bytes = 0;
  int depth = 0;
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
  bool operator==(const IoTiming&) const = default;
};

/// Bytes per second of a stream that reads and writes as much: the harmonic mean of the two. A step with the optimizer
/// in files is one.
[[nodiscard]] double balanced(const IoTiming& timing);

/// Of the timings within `slack` (0.05: 5 %) of the fastest by balanced(), the one with the least memory in flight,
/// depth times block; of equal ones the first. `timings` must not be empty.
[[nodiscard]] const IoTiming& propose(std::span<const IoTiming> timings, double slack);

/// What `zeroth-bench io --json` writes: {"zeroth_io": 1, "folders", "access", "rows", "proposal"}.
[[nodiscard]] std::string to_json(std::span<const IoTiming> timings, const IoTiming& proposal,
                                  std::span<const std::string> folders, const std::string& access);

}  // namespace zeroth::bench
