// The processors that a process may use.
#pragma once

#include <sys/types.h>

#include <vector>

namespace zeroth {

/// A logical processor and where it is.
struct Processor {
  int number = 0;
  int node = 0;  ///< NUMA
  int package = 0;
  int core = 0;  ///< processors with the same package and core are threads of one core

  bool operator==(const Processor&) const = default;
};

/// The processors of this process's affinity mask, with what the kernel says about them (nothing: all on node
/// 0, each its own core).
[[nodiscard]] std::vector<Processor> processors_here();
/// The same of another process: of a launcher, which has given its ranks cores of their own.
[[nodiscard]] std::vector<Processor> processors_of(pid_t process);

}  // namespace zeroth
