// Preemption: a scheduler sends SIGTERM because it needs the node back soon. The process notes it, and its engines tell
// all ranks at the next step.
#pragma once

#include <chrono>
#include <string_view>

namespace zeroth {

/// SIGTERMs within this time are one request, because a scheduler signals every process of a step and a launcher passes
/// its own SIGTERM on.
inline constexpr std::chrono::milliseconds kOneRequest{1000};

/// The line that a process writes to standard error when it has noted SIGTERM, without the newline. zeroth-run reads it
/// and gives such a rank more time.
inline constexpr std::string_view kMakesRoom =
    "zeroth: SIGTERM has come: this process makes room, and says so to all ranks at its next step";

/// Exit code of a job that has made room and wants to be started again: EX_TEMPFAIL of sysexits.h.
inline constexpr int kExitPreempted = 75;

/// Installs a handler of SIGTERM. The first SIGTERM then only sets a flag and writes `kMakesRoom`. A second one, later
/// than `kOneRequest`, ends the process as by default. In a child forked later, the first SIGTERM ends the child.
/// Replaces the current handler; a second call does nothing. Throws Error(kResource).
void catch_preemption();

/// True if SIGTERM has come since then. Any thread.
[[nodiscard]] bool preemption_requested() noexcept;

/// Acts as if SIGTERM had come: for schedulers that do not send SIGTERM, and for tests.
void request_preemption() noexcept;

}  // namespace zeroth
