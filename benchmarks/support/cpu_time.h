// Processor time that processes have used.
#pragma once

#include <sys/resource.h>

namespace zeroth::benchmarks {

/// Seconds in user and kernel mode: of RUSAGE_SELF, or of RUSAGE_CHILDREN, those that have ended and were waited for.
[[nodiscard]] inline double cpu_seconds(int whose = RUSAGE_SELF) {
  rusage used{};
  ::getrusage(whose, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

}  // namespace zeroth::benchmarks
