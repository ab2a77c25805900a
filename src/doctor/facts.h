// What a process finds out about the host that it is on, without any library that it would need.
#pragma once

#include "doctor/report.h"

#include <zeroth/base/deadline.h>

#include <functional>
#include <string>

namespace zeroth::doctor {

/// All but rank and host, which the caller knows. Versions of libraries are asked in a forked child with a deadline, so
/// that a broken one ends or holds up only that; call before there are threads.
[[nodiscard]] RankFacts facts_of_this_process();

/// What `task` returns in a forked child; "" if it crashes, or takes longer.
[[nodiscard]] std::string ask_in_child(const std::function<std::string()>& task, Milliseconds patience);

/// Writes one file of `bytes` in the folder, syncs it, reads it back and removes it. Nothing is thrown: see
/// DiskFacts::error.
[[nodiscard]] DiskFacts measure_disk(const std::string& folder, std::size_t bytes, Milliseconds patience);

/// The loopback address that all of a name's addresses are, the first of them; "" if one is not, or there is none.
[[nodiscard]] std::string loopback_of(const std::string& name);

}  // namespace zeroth::doctor
