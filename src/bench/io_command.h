// zeroth-bench io: what transfers to files take here, and which engine, block size and depth to use.
#pragma once

#include <span>

namespace zeroth::bench {

/// Does what the arguments after the word "io" say; returns the exit code. Throws Error.
[[nodiscard]] int run_io_command(std::span<const char* const> arguments);

}  // namespace zeroth::bench
