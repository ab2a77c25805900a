// Preemption: a scheduler says SIGTERM and wants the node back soon. The process notes it, and its engines tell all ranks at the next step.
#pragma once

namespace zeroth {

/// From now on the first SIGTERM only sets a flag; a second one ends the process, as SIGTERM does by default. Replaces the handler of
/// SIGTERM; calling it again does nothing.
void catch_preemption();

/// Whether SIGTERM has come since. Any thread.
[[nodiscard]] bool preemption_requested() noexcept;

/// As if SIGTERM had come: for schedulers that say it in another way, and for tests.
void request_preemption() noexcept;

/// Exit code of a job that has made room and wants to be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int kExitPreempted = 75;

}  // namespace zeroth
