// Interrupts: the user's program can end a wait. Python's Ctrl-C only sets a flag, which the interpreter must read.
#pragma once

#include <string>

namespace zeroth {

/// Throws any exception to end the wait that called it, or returns to continue the wait. Called about every 100 ms on
/// the waiting thread, which holds none of Zeroth's locks.
using InterruptCheck = void (*)();

/// Sets the check of the whole process; null, the default: none. `check` must stay callable.
void set_interrupt_check(InterruptCheck check) noexcept;

/// Calls the check. Every wait of a rank calls this once per slice (kWaitSlice).
void check_interrupt();

/// For the handler of an exception that is no Error and ends a call of all ranks on this one: what the others are told,
/// with the first line of the exception's text.
[[nodiscard]] std::string interrupted_text();

}  // namespace zeroth
