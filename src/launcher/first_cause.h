// Which of several failing ranks failed first in the sense that matters: the cause, not the echo.
#pragma once

#include <zeroth/base/deadline.h>

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace zeroth::launcher {

/// How one rank ended badly, as seen by the launcher.
struct FailureRecord {
  int rank = 0;
  pid_t pid = 0;
  int exit_code = 0;  ///< non-zero, or 0 when a signal ended the rank
  int signal = 0;     ///< 0 when the rank exited by itself
  bool core_dumped = false;
  SteadyClock::time_point when{};  ///< when the launcher saw it
  std::string error_line{};        ///< the rank's last line with an error of Zeroth (error_line.h), if it wrote one
  std::string host{};              ///< where, if the job has several hosts
  int num_ranks = 0;  ///< not 0: the whole host failed, with so many ranks from `rank` on; no process, no signal
};

/// What a record says about its rank. [Note: Cause and echo] in first_cause.cpp tells which of several
/// explains a job.
enum class FailureClass {
  kOwnFault,     ///< an error of Zeroth about the rank itself: configuration, model, memory, I/O, numerics ...
  kSignal,       ///< killed
  kHostLost,     ///< nobody on that host answers
  kUnexplained,  ///< an exit code of the program's own, or SIGABRT (it ends uncaught exceptions): cause or
                 ///< echo
  kMismatch,     ///< ranks disagree: somebody else took the other path
  kTimeout,      ///< nothing came in time
  kPeerLost,     ///< another rank went first
  kAborted,      ///< told to stop by another rank
};

/// Failures this close together are seen in one look, in the order of their ranks: which came first is not
/// known.
inline constexpr Milliseconds kOneLook{10};

/// From the signal and the exit code, and where they leave it open (76 is shared by several errors; 1, 2 and
/// SIGABRT by all programs) from the code in the error line.
[[nodiscard]] FailureClass classify(const FailureRecord& record);

/// Nothing that happens later can explain the job better than a record of this class.
[[nodiscard]] constexpr bool is_final(FailureClass failure_class) {
  return failure_class == FailureClass::kOwnFault;
}

/// A rank that ends so names another one, which therefore failed before it, seen or not yet.
[[nodiscard]] constexpr bool is_echo(FailureClass failure_class) {
  return failure_class == FailureClass::kPeerLost || failure_class == FailureClass::kAborted;
}

/// Index of the record that explains the job; none if empty. Does not depend on the order of the records.
[[nodiscard]] std::optional<std::size_t> first_cause(std::span<const FailureRecord> records);

/// The job's exit code for that record: the rank's own, or 128 + signal.
[[nodiscard]] int job_exit_code(const FailureRecord& record);

/// "SIGKILL", "SIGRTMIN+3".
[[nodiscard]] std::string signal_name(int signal);

/// "rank 1 (pid 77) was killed by signal 9 (SIGKILL)" or "rank 1 (pid 77) exited with code 78: ZEROTH ERROR
/// ...".
[[nodiscard]] std::string describe(const FailureRecord& record);

/// What an error line of another rank adds to describe() of a rank that has written none: ": [USER] ValueError: no such
/// token: 50257; where: ..." of one that told the others why it stopped, ", in action 1B3 of step 4 (...)" of one that
/// died; "" if the line is about something else.
[[nodiscard]] std::string said_of(const FailureRecord& record, std::string_view line);

/// "; the other 3 ranks were ended" for a world of `num_ranks` of which `num_ended` others were still
/// running.
[[nodiscard]] std::string describe_others(int num_ended, int num_ranks);

}  // namespace zeroth::launcher
