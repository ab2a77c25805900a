// Watches the ranks of one job from their start to the last of them.
#pragma once

#include "launcher/first_cause.h"
#include "launcher/line_merger.h"
#include "launcher/options.h"
#include "launcher/output.h"
#include "launcher/rank_process.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <poll.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// A rank that has ended gets this long until its pipes are at their end (children of its own may still
/// write).
inline constexpr Milliseconds kLinger{500};
/// After the first failure better explanations are awaited for this long before the others are told to stop.
inline constexpr Milliseconds kCauseWindow{200};
/// The same while all failures name another rank: a Python process that has raised takes its time to end.
inline constexpr Milliseconds kEchoWindow{2000};
/// From SIGTERM to SIGKILL.
inline constexpr Milliseconds kTerminateGrace{1300};
/// A process that SIGKILL does not end within this time is stuck in the kernel; nobody waits for it any
/// longer.
inline constexpr Milliseconds kStuck{5000};

/// One started rank on its way into the supervisor.
struct StartedRank {
  RankProcess process;
  RankStream out;
  RankStream err;
};

/// One thread, one poll: signals (SIGCHLD too) through a signalfd, the ranks' pipes, our own output. No
/// polling sleep: with no deadline near it sleeps until something happens. See [Note: End of a job] in
/// supervisor.cpp.
class Supervisor {
 public:
  /// `sinks` (standard output, standard error; may be the same object) and `inbox` outlive this.
  Supervisor(const Options& options, SignalInbox& inbox, OutputSink& out, OutputSink& err);

  /// Ranks in order, before `run`.
  void add(StartedRank rank);
  /// Where the lines of the ranks wait for their likes before they go to `sink`, one of the two.
  [[nodiscard]] LineMerger& merger(const OutputSink& sink) { return mergers_[&sink == sinks_[0] ? 0 : 1]; }
  void set_stdin(StdinRelay relay) { relay_ = std::move(relay); }
  /// A line of our own, "zeroth-run: " before it, on standard error.
  void say(std::string_view text);

  /// Blocks until every rank and its process group have ended and the output is written; returns the exit
  /// code of the job.
  [[nodiscard]] int run();

 private:
  enum class RankState { kRunning, kLingering, kEnding, kGone };
  enum class Stop { kNone, kFailure, kSignal, kTimeout, kOutputClosed };
  using TimePoint = SteadyClock::time_point;

  struct Rank {
    StartedRank started;
    RankState state = RankState::kRunning;
    TimePoint until{};  ///< end of lingering, then of waiting for the rest of the group

    [[nodiscard]] bool drained() const { return !started.out.open() && !started.err.open(); }
  };

  [[nodiscard]] bool ranks_gone() const;
  void flush_sinks();
  void wait_for_events();
  [[nodiscard]] int poll_timeout_ms() const;
  void handle_signal(int signal);
  void handle_exits();
  void record_exit(std::size_t index, const ExitStatus& status);
  void reap_orphans();
  void settle_ranks();
  void check_deadlines();
  void check_sinks();
  void suspend();
  void begin_stop(Stop reason);
  void await_cause();
  void terminate(int signal);
  void kill_all();
  void signal_groups(int signal);
  [[nodiscard]] int conclude();

  Options options_;
  SignalInbox* inbox_;
  std::array<OutputSink*, 2> sinks_;
  std::array<LineMerger, 2> mergers_;  // of the sinks; where both are one, the second is not used
  StdinRelay relay_;
  std::vector<Rank> ranks_;
  std::vector<FailureRecord> failures_;
  Stop stop_ = Stop::kNone;
  int stop_signal_ = 0;
  int output_error_ = 0;
  int num_running_at_stop_ = 0;
  bool terminated_ = false;  ///< the ranks have been told to stop: later failures are consequences
  bool abandon_output_ = false;
  std::optional<TimePoint> timeout_at_;
  std::optional<TimePoint> terminate_at_;
  std::optional<TimePoint> kill_at_;
  std::optional<TimePoint> stuck_at_;
  std::vector<pollfd> polled_;
};

}  // namespace zeroth::launcher
