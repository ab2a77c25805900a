// What is wrong, from what was measured. Pure functions of a report.
#pragma once

#include "doctor/report.h"

#include <cstdint>
#include <vector>

namespace zeroth::doctor {

/// From here on something is a finding.
struct Thresholds {
  double slow_link = 0.5;  ///< bandwidth below this part of what is usual, or latency above what is usual divided by it
  double skew_ms = 500;    ///< between clocks
  std::uint64_t free_disk_bytes = std::uint64_t{1} << 30U;
};

/// What is usual among links of one kind: each end's best, and of these the median. So neither one bad cable nor one
/// bad host, whose links are all slow, is taken for usual. Ends are ranks, and hosts of far links.
struct Usual {
  double bytes_per_s = 0;
  double latency_us = 0;
  int ends = 0;
};
[[nodiscard]] Usual usual_of(const Report& report, std::string_view transport, bool far);

/// The figure that a link is judged by: the worse direction, and inside a host, where both go through the same memory
/// and differ by what else runs there, the better.
[[nodiscard]] double figure_of(const Link& link);

/// Indices into report.links: those whose figure is low for their kind, or a latency that is too long: more than 100 us
/// beyond what is usual as well.
[[nodiscard]] std::vector<std::size_t> odd_links(const Report& report, const Thresholds& thresholds);

/// Indices of what most do not have: with a tie, what is not as the first.
[[nodiscard]] std::vector<std::size_t> odd_ones_out(const std::vector<std::string>& values);

/// Adds to report.findings what can be said of its facts.
void judge(Report& report, const Thresholds& thresholds);

}  // namespace zeroth::doctor
