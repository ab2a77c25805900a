// Preemption: a scheduler says SIGTERM and wants the node back soon. The process notes it, and its engines tell all
// ranks at the next step.
#pragma once

#include <chrono>
#include <string_view>

namespace zeroth {

/// SIGTERMs this close together are one request: a scheduler signals every process of a step, and a launcher passes its
/// own on.
inline constexpr std::chrono::milliseconds kOneRequest{1000};

/// The line that a process writes to standard error when it has noted SIGTERM, without its end. zeroth-run reads it: a
/// rank that makes room gets more time.
inline constexpr std::string_view kMakesRoom =
    "zeroth: SIGTERM has come: this process makes room, and says so to all ranks at its next step";

/// Exit code of a job that has made room and wants to be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int kExitPreempted = 75;

/// From now on the first SIGTERM only sets a flag and writes `kMakesRoom`; a second one, later than `kOneRequest`, ends
/// the process, as SIGTERM does by default. So does the first in a child that was forked since. Replaces the handler of
/// SIGTERM; calling it again does nothing. Throws Error(kResource).
void catch_preemption();

/// Whether SIGTERM has come since. Any thread.
[[nodiscard]] bool preemption_requested() noexcept;

/// As if SIGTERM had come: for schedulers that say it in another way, and for tests.
void request_preemption() noexcept;

}  // namespace zeroth
