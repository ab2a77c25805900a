// Rank 0's side: meets the other ranks, asks them for their facts, and has them measure their links, pair by pair.
#pragma once

#include "doctor/judge.h"
#include "doctor/place.h"
#include "doctor/report.h"

#include <zeroth/base/deadline.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::doctor {

struct SurveyOptions {
  std::string folder{};  ///< for the file that is written and read; "": none
  std::size_t disk_bytes = std::size_t{64} << 20U;
  Milliseconds meeting{20'000};  ///< so long the others may take to come
  Thresholds thresholds{};       ///< a link that is slow by these is measured again
};

/// Blocks until all has been asked. `own` leads to rank 0's own participant. Ranks that do not come, or do not answer
/// any more, are findings.
[[nodiscard]] Report survey(const Place& place, Door& door, Wire own, const SurveyOptions& options);

using Pair = std::pair<int, int>;
/// All pairs of 0 ... count-1, in rounds whose pairs have no end in common. Up to 8 one pair a round, so that none
/// disturbs another; beyond that as few rounds as there can be.
[[nodiscard]] std::vector<std::vector<Pair>> rounds_of(int count);

}  // namespace zeroth::doctor
