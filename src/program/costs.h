// What the simulator asks the costs: how long an action takes, and what it changes of what its rank holds.
#pragma once

#include "program/checks.h"

#include <zeroth/program/simulate.h>

#include <cmath>
#include <vector>

namespace zeroth {

[[nodiscard]] inline bool is_time(double value) {
  return std::isfinite(value) && value >= 0;
}

/// Throws kUsage for costs that do not fit the program or are no times.
void require_costs(const StepProgram& program, const Costs& costs);
/// How long an action keeps its rank, or its lane, busy; messages 0.
[[nodiscard]] double duration_of(const Costs& costs, int rank, const Action& action);

/// Appends the changes of an action as points in any order; pairs and bytes are then differences.
void add_live_changes(const ActionIndex& index, const Costs& costs, const Action& action, double begin, double end,
                      std::vector<LivePoint>& live);
/// Sorts the differences of `times.live` by time and replaces them by their sums.
void add_up_live(RankTimes& times);

}  // namespace zeroth
