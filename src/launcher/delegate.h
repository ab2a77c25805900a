// Another launcher in our place: mpirun or srun gets the same job as a command line.
#pragma once

#include "launcher/options.h"

#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {

struct Delegation {
  std::vector<std::string> command{};                              ///< argv
  std::vector<std::pair<std::string, std::string>> environment{};  ///< to be set for it: values are on no command line
};

/// `environment`: of this process, "NAME=VALUE"; its names go to other hosts with mpirun, srun carries all by
/// itself. Throws Error(kUsage) for what that launcher cannot be told.
[[nodiscard]] Delegation delegation_of(const Options& options, const std::vector<std::string>& environment);

/// As one would type it in a shell.
[[nodiscard]] std::string shell_text(const Delegation& delegation);

/// Prints the command, and becomes it unless it is a dry run; then returns 0. Throws Error if the launcher
/// cannot be started.
[[nodiscard]] int delegate(const Options& options);

}  // namespace zeroth::launcher
