// Commands of zeroth that the Python package does: `zeroth ckpt`.
#pragma once

#include <span>

namespace zeroth::doctor {

/// Becomes `python main(arguments)` of zeroth.ckpt; returns only by an Error. The Python is $ZEROTH_PYTHON, or the one
/// in this program's folder (where pip has installed both), or python3 of PATH. Throws kEnvironment if there is none.
/// One that cannot import zeroth says so, with the same exit code.
[[noreturn]] void become_ckpt(std::span<const char* const> arguments);

}  // namespace zeroth::doctor
