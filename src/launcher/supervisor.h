// Watches the ranks of one job from their start to the last of them.
#pragma once

#include "launcher/console.h"
#include "launcher/first_cause.h"
#include "launcher/host_notes.h"
#include "launcher/job_log.h"
#include "launcher/line_merger.h"
#include "launcher/options.h"
#include "launcher/output.h"
#include "launcher/rank_group.h"
#include "launcher/signals.h"

#include <zeroth/base/deadline.h>

#include <poll.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::launcher {

/// After the first failure better explanations are awaited for this long before the others are told to stop.
inline constexpr Milliseconds kCauseWindow{200};
/// The same while all failures name another rank: a Python process that has raised takes its time to end.
inline constexpr Milliseconds kEchoWindow{2000};
/// After the end of a job its agents have this long to leave.
inline constexpr Milliseconds kFarewell{2000};

/// One start of a job.
struct Attempt {
  int restart = 0;        ///< starts before this one
  JobTimeout timeout{};   ///< of the whole job
  JobLog* log = nullptr;  ///< outlives this
};

/// One thread, one poll: signals (SIGCHLD too) through a signalfd, the groups' descriptors, our own output.
/// No polling sleep: with no deadline near it sleeps until something happens. See [Note: End of a job] in
/// supervisor.cpp.
class Supervisor final : public GroupListener {
 public:
  /// What `console` refers to outlives this. Throws Error(kIo) if a log file cannot be made.
  Supervisor(const Options& options, const Console& console, const Attempt& attempt);

  /// Before `run`; together the groups have every rank.
  void add(std::unique_ptr<RankGroup> group) { groups_.push_back(std::move(group)); }
  void set_stdin(StdinRelay relay) { relay_ = std::move(relay); }
  /// A line of our own, "zeroth-run: " before it, on standard error.
  void say(std::string_view text);

  /// Blocks until every rank and its process group have ended and the output is written; returns how the job
  /// ended.
  [[nodiscard]] JobEnd run();

  void rank_output(int rank, Stream stream, std::string_view bytes) override;
  void rank_output_ended(int rank, Stream stream) override;
  void rank_ended(int rank, const std::string& host, pid_t pid, const ExitStatus& status) override;
  void host_failed(const std::string& host, int first_rank, int num_ranks, const Error& error) override;
  void host_note(const std::string& host, std::string_view text) override;
  [[nodiscard]] bool congested(Stream stream) const override;

 private:
  enum class Stop { kNone, kFailure, kSignal, kTimeout, kOutputClosed };

  [[nodiscard]] RankOutput& output_of(int rank, Stream stream);
  [[nodiscard]] bool ranks_gone() const;
  void flush_sinks();
  /// What hosts have said that is due by then.
  void write_notes(TimePoint now = TimePoint::max());
  void write(std::string_view text);
  void wait_for_events();
  [[nodiscard]] int poll_timeout_ms() const;
  void handle_signal(int signal);
  void look_for_exits();
  void record(FailureRecord failure);
  void settle_groups();
  void check_deadlines();
  void check_sinks();
  void suspend();
  void begin_stop(Stop reason);
  void await_cause();
  void grant_room();
  [[nodiscard]] bool makes_room() const { return told_to_make_room_ || num_preempted_ > 0; }
  [[nodiscard]] bool preempted() const;
  void terminate(int signal);
  void kill_all();
  void signal_groups(int signal);
  [[nodiscard]] std::optional<TimePoint> doubt() const;
  [[nodiscard]] std::string said_of(const FailureRecord& cause);
  [[nodiscard]] JobEnd conclude();
  void end_groups(const JobEnd& end);

  Options options_;
  Attempt attempt_;
  SignalInbox* inbox_;
  std::array<OutputSink*, 2> sinks_;
  std::array<LineMerger, 2> mergers_;  // of the sinks; where both are one, the second is not used
  HostNotes notes_;
  StdinRelay relay_;
  std::vector<RankOutput> outputs_;  // two for each rank
  std::vector<FailureRecord> failures_;
  Stop stop_ = Stop::kNone;
  int stop_signal_ = 0;
  int output_error_ = 0;
  int num_running_at_stop_ = 0;
  int num_preempted_ = 0;           ///< ranks that ended with kExitPreempted
  int num_well_ended_ = 0;          ///< these, and those with 0
  bool told_to_make_room_ = false;  ///< a rank has said so: the ranks have had their SIGTERM
  TimePoint stopped_at_{};
  bool terminated_ = false;  ///< the ranks have been told to stop: later failures are consequences
  bool abandon_output_ = false;
  std::optional<TimePoint> timeout_at_;
  std::optional<TimePoint> terminate_at_;
  std::optional<TimePoint> kill_at_;
  std::optional<TimePoint> stuck_at_;
  std::vector<pollfd> polled_;
  std::vector<std::unique_ptr<RankGroup>> groups_;  // last: they end before what they report to
};

}  // namespace zeroth::launcher
