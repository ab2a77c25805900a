// The report as a table that people paste into an issue.
#pragma once

#include "doctor/judge.h"

#include <string>

namespace zeroth::doctor {

/// Several lines, each ended; findings last. Nothing in it is wider than it must be, nothing is coloured.
[[nodiscard]] std::string table_of(const Report& report, const Thresholds& thresholds);

}  // namespace zeroth::doctor
