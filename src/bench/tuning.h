// From times to a table of which backend makes which calls.
#pragma once

#include <zeroth/comm/mixed.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zeroth::bench {

/// One call at one size.
struct Timing {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  std::uint64_t bytes = 0;                                    ///< table_bytes()
  std::map<std::string, std::vector<double>> microseconds{};  ///< by backend: of the slowest rank, one a round
};

/// Of what is not empty.
[[nodiscard]] double median(std::vector<double> values);

/// The fastest backend for each, by the medians; `backends.front()` unless another one is faster by more than `gain`
/// (0.05: 5 %). Neighbours with one backend make one row, and two rows part at the geometric mean of the sizes that
/// were measured. Kinds that have one row (messages between two ranks) get the backend with the least sum of
/// logarithms.
[[nodiscard]] CallTable choose(const std::vector<Timing>& timings, const std::vector<std::string>& backends,
                               double gain);

}  // namespace zeroth::bench
