// A rank of the doctor: does what rank 0's survey asks for, until it says that this is the end.
#pragma once

#include "doctor/place.h"
#include "doctor/pretend.h"
#include "doctor/report.h"

#include <zeroth/base/deadline.h>

namespace zeroth::doctor {

/// Blocks. Errors of single tasks are answers; throws Error for a survey that has gone or is silent for `patience`.
void take_part(Wire& survey, const Place& place, const RankFacts& facts, const Pretence& pretence,
               Milliseconds patience);

/// Of one task; the survey waits a little longer.
inline constexpr Milliseconds kTaskPatience{10'000};

}  // namespace zeroth::doctor
