// Interrupts: how the program around Zeroth ends a wait. Python's Ctrl-C only sets a flag that the interpreter must
// look at.
#pragma once

namespace zeroth {

/// Throws, whatever it likes, to end the wait that called it; returns to let it go on. Called on the waiting thread
/// without any of our locks, about every 100 ms.
using InterruptCheck = void (*)();

/// For the whole process; null: none, as at the start. `check` must stay callable.
void set_interrupt_check(InterruptCheck check) noexcept;

/// Every wait of a rank calls this once a slice (kWaitSlice).
void check_interrupt();

}  // namespace zeroth
