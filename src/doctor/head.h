// What `zeroth doctor` does that no launcher has started: starts itself as ranks, through zeroth-run, and judges what
// they report.
#pragma once

#include "doctor/options.h"
#include "doctor/report.h"

namespace zeroth::doctor {

/// Runs the examination; hosts that cannot take part become findings, and the others are examined without them. Blocks,
/// for each attempt at most the options' timeouts and half a minute. Throws Error: kUsage (there is no zeroth-run),
/// kResource.
[[nodiscard]] Report examine(const Options& options);

/// Judges the report and, if the options say the size of a model, adds a proposal.
void conclude(Report& report, const Options& options);

}  // namespace zeroth::doctor
