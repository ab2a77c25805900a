// What zeroth leaves to Python: `zeroth ckpt`, and pictures.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace zeroth::doctor {

/// Becomes `python main(arguments)` of zeroth.ckpt; returns only by an Error. The Python is $ZEROTH_PYTHON, or the one
/// in this program's folder (where pip has installed both), or python3 of PATH. Throws kEnvironment if there is none.
/// One that cannot import zeroth says so, with the same exit code.
[[noreturn]] void become_ckpt(std::span<const char* const> arguments);

/// Becomes `python -c program arguments...`, with `input` as its standard input; the Python is the same.
[[noreturn]] void become_python(const std::string& program, const std::vector<std::string>& arguments,
                                const std::string& input);

}  // namespace zeroth::doctor
