// What a command runs: a program, or the Python of the environment for a script or a module.
#pragma once

#include <string>
#include <vector>

namespace zeroth::launcher {

/// The first word of a command that runs a module of Python: {"-m", MODULE, arguments...}.
inline constexpr const char* kModule = "-m";

struct Program {
  std::string file{};                    ///< for execve
  std::vector<std::string> arguments{};  ///< argv, argv[0] included
  std::string note{};  ///< "train.py is run by /venv/bin/python -u (VIRTUAL_ENV)"; "" where no interpreter was chosen
};

/// Whether an interpreter is chosen: for a file that ends in .py, executable or not, and for a module.
[[nodiscard]] bool runs_by_python(const std::vector<std::string>& command);

/// Looks on this host and in this directory. A script is a file of the working directory or, as a bare name, an
/// executable of PATH; its Python is bin/python of VIRTUAL_ENV, else python3 or python of PATH, without buffering (-u)
/// as under torchrun. Everything else is what find_program() finds. Throws Error: kUsage (no such file), kEnvironment
/// (not executable, not readable, no Python).
[[nodiscard]] Program program_of(const std::vector<std::string>& command, const std::vector<std::string>& environment);

}  // namespace zeroth::launcher
