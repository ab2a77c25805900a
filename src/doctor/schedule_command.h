// zeroth schedule: the program of a pipeline, printed, verified, simulated and drawn.
#pragma once

#include <span>

namespace zeroth::doctor {

/// Does what the arguments after the word "schedule" say; returns the exit code. Throws Error. With --png it becomes
/// Python at its end.
[[nodiscard]] int run_schedule_command(std::span<const char* const> arguments);

}  // namespace zeroth::doctor
