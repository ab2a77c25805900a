// Which of several failing ranks failed first in the sense that matters: the cause, not the echo.
#pragma once

#include <zeroth/base/deadline.h>

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>

namespace zeroth::launcher {

/// How one rank ended badly, as seen by the launcher.
struct FailureRecord {
  int rank = 0;
  pid_t pid = 0;
  int exit_code = 0;  ///< non-zero, or 0 when a signal ended the rank
  int signal = 0;     ///< 0 when the rank exited by itself
  bool core_dumped = false;
  SteadyClock::time_point when{};  ///< when the launcher saw it
  std::string error_line{};        ///< the rank's last line with "ZEROTH ERROR [CODE] ...", if it wrote one
};

/// Causes before consequences: a smaller class explains a larger one.
enum class FailureClass {
  kOwnFault,  ///< configuration, user exception, memory, I/O, numerics: the rank itself says no
  kSignal,    ///< killed
  kMismatch,  ///< ranks disagree: somebody else took the other path
  kTimeout,   ///< nothing came in time
  kPeerLost,  ///< another rank went first
  kAborted,   ///< told to stop by another rank
};

/// From the signal, the exit code, and for the exit codes that several errors share (1 of an uncaught
/// exception, 76) the code in the error line.
[[nodiscard]] FailureClass classify(const FailureRecord& record);

/// Nothing that happens later can explain the job better than a record of this class.
[[nodiscard]] constexpr bool is_final(FailureClass failure_class) {
  return failure_class == FailureClass::kOwnFault;
}

/// Index of the record that explains the job: least class, then earliest, then lowest rank; none if empty.
[[nodiscard]] std::optional<std::size_t> first_cause(std::span<const FailureRecord> records);

/// The job's exit code for that record: the rank's own, or 128 + signal.
[[nodiscard]] int job_exit_code(const FailureRecord& record);

/// "SIGKILL", "SIGRTMIN+3".
[[nodiscard]] std::string signal_name(int signal);

/// "rank 1 (pid 77) was killed by signal 9 (SIGKILL)" or "rank 1 (pid 77) exited with code 78: ZEROTH ERROR
/// ...".
[[nodiscard]] std::string describe(const FailureRecord& record);

/// "; the other 3 ranks were ended" for a world of `num_ranks` of which `num_ended` others were still
/// running.
[[nodiscard]] std::string describe_others(int num_ended, int num_ranks);

}  // namespace zeroth::launcher
