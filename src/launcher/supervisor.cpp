#include "launcher/supervisor.h"

#include <zeroth/base/error.h>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

namespace zeroth::launcher {

// [Note: End of a job] A rank goes through kRunning -> kLingering (it has ended, its pipes may hold more) ->
// kEnding (its group got SIGKILL, the leader is reaped, members that became our children are being reaped) ->
// kGone. The launcher is a subreaper, so the orphans of a group are its children and "nothing is left" is
// something that it can wait for. The job as a whole is stopped for one reason (Stop), the first that comes:
//   failure        a rank ended badly: wait for a better explanation (kCauseWindow; kEchoWindow while all
//                  failures name another rank; not at all if there can be none), SIGTERM to all, SIGKILL
//                  kTerminateGrace later
//   signal         Ctrl-C, SIGTERM, SIGHUP, SIGQUIT to us: passed on, SIGKILL after options.grace or at the
//                  next such signal
//   timeout        SIGTERM, SIGKILL after kTerminateGrace
//   output closed  nobody reads our output any more: the same
// A rank that exits with 0 early is no failure here; its peers notice and say so.

Supervisor::Supervisor(const Options& options, SignalInbox& inbox, OutputSink& out, OutputSink& err)
    : options_(options),
      inbox_(&inbox),
      sinks_{&out, &err},
      mergers_{LineMerger(out, options.num_ranks), LineMerger(err, options.num_ranks)} {
  if (options.timeout) {
    timeout_at_ = SteadyClock::now() + *options.timeout;
  }
}

void Supervisor::add(StartedRank rank) {
  ranks_.push_back(Rank{.started = std::move(rank)});
}

void Supervisor::say(std::string_view text) {
  for (LineMerger& merger : mergers_) merger.flush_all();
  sinks_[1]->queue() += fmt::format("zeroth-run: {}\n", text);
}

int Supervisor::run() {
  // A rank may have ended before the first look; its SIGCHLD may have been merged with another.
  handle_exits();
  settle_ranks();
  while (!ranks_gone()) {
    flush_sinks();
    wait_for_events();
    settle_ranks();
    check_sinks();
    check_deadlines();
    settle_ranks();
  }
  const int code = conclude();
  for (LineMerger& merger : mergers_) merger.flush_all();
  flush_sinks();
  while (!abandon_output_ && (sinks_[0]->pending() > 0 || sinks_[1]->pending() > 0)) {
    wait_for_events();
    flush_sinks();
  }
  return code;
}

void Supervisor::flush_sinks() {
  const TimePoint now = SteadyClock::now();
  for (LineMerger& merger : mergers_) merger.flush(now);
  for (OutputSink* sink : sinks_) {
    sink->flush_some();
  }
}

bool Supervisor::ranks_gone() const {
  return std::all_of(
      ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.state == RankState::kGone; });
}

void Supervisor::wait_for_events() {
  polled_.clear();
  polled_.push_back({.fd = inbox_->fd(), .events = POLLIN, .revents = 0});
  for (const OutputSink* sink : sinks_) {
    polled_.push_back({.fd = sink->pending() > 0 ? sink->fd() : -1, .events = POLLOUT, .revents = 0});
  }
  polled_.push_back(
      {.fd = relay_.active() ? relay_.poll_fd() : -1, .events = relay_.poll_events(), .revents = 0});
  const std::size_t first_stream = polled_.size();
  for (const Rank& rank : ranks_) {
    for (const RankStream* stream : {&rank.started.out, &rank.started.err}) {
      // poll leaves negative descriptors out.
      polled_.push_back(
          {.fd = stream->sink().congested() ? -1 : stream->fd(), .events = POLLIN, .revents = 0});
    }
  }
  if (::poll(polled_.data(), polled_.size(), poll_timeout_ms()) <= 0) {
    return;
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    StartedRank& rank = ranks_[i].started;
    if (polled_[first_stream + 2 * i].revents != 0) rank.out.read_some();
    if (polled_[first_stream + 2 * i + 1].revents != 0) rank.err.read_some();
  }
  if (polled_[3].revents != 0) {
    relay_.advance();
  }
  if (polled_[0].revents != 0) {
    bool child_ended = false;
    for (const int signal : inbox_->take()) {
      if (signal == SIGCHLD) {
        child_ended = true;
      } else {
        handle_signal(signal);
      }
    }
    if (child_ended) {
      handle_exits();
    }
  }
}

int Supervisor::poll_timeout_ms() const {
  std::optional<TimePoint> next;
  const auto consider = [&next](std::optional<TimePoint> point) {
    if (point && (!next || *point < *next)) next = point;
  };
  consider(timeout_at_);
  consider(terminate_at_);
  consider(kill_at_);
  consider(stuck_at_);
  for (const LineMerger& merger : mergers_) consider(merger.next());
  for (const Rank& rank : ranks_) {
    if (rank.state == RankState::kLingering || rank.state == RankState::kEnding) consider(rank.until);
  }
  if (!next) {
    return -1;
  }
  const auto left = std::chrono::ceil<Milliseconds>(*next - SteadyClock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 3'600'000));
}

void Supervisor::handle_signal(int signal) {
  switch (signal) {
    case SIGUSR1:
    case SIGUSR2:
      for (const Rank& rank : ranks_) rank.started.process.signal_leader(signal);
      return;
    case SIGTSTP:
      suspend();
      return;
    default:
      break;
  }
  if (ranks_gone()) {
    abandon_output_ = true;  // only a reader of our output that does not read is left to wait for
  } else if (stop_ == Stop::kNone) {
    stop_signal_ = signal;
    begin_stop(Stop::kSignal);
  } else {
    kill_all();
  }
}

void Supervisor::handle_exits() {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].state == RankState::kRunning) {
      if (const auto status = ranks_[i].started.process.exit_status()) record_exit(i, *status);
    }
  }
  reap_orphans();
}

void Supervisor::record_exit(std::size_t index, const ExitStatus& status) {
  Rank& rank = ranks_[index];
  const TimePoint now = SteadyClock::now();
  // What it wrote before it ended is in the pipes by now, the error line too.
  rank.started.out.drain();
  rank.started.err.drain();
  rank.state = RankState::kLingering;
  rank.until = now + kLinger;
  if (index == 0) {
    relay_.close();
  }
  if (status.ok() || terminated_ || (stop_ != Stop::kNone && stop_ != Stop::kFailure)) {
    return;
  }
  const std::string& line = rank.started.err.last_error_line();
  failures_.push_back({.rank = static_cast<int>(index),
                       .pid = rank.started.process.pid(),
                       .exit_code = status.exit_code,
                       .signal = status.signal,
                       .core_dumped = status.core_dumped,
                       .when = now,
                       .error_line = line.empty() ? rank.started.out.last_error_line() : line});
  if (stop_ == Stop::kNone) {
    begin_stop(Stop::kFailure);
  }
  await_cause();
}

/// Sets when a failing job is told to stop, from the failures that are known.
void Supervisor::await_cause() {
  const auto any = [this](auto&& is) {
    return std::ranges::any_of(failures_, [&](const FailureRecord& failure) { return is(classify(failure)); });
  };
  const bool only_echoes = !any([](FailureClass failure_class) { return !is_echo(failure_class); });
  terminate_at_ = failures_.front().when + (only_echoes ? kEchoWindow : kCauseWindow);
  if (any(is_final)) terminate_at_ = failures_.back().when;
  kill_at_ = *terminate_at_ + kTerminateGrace;
}

/// Grandchildren whose parents have ended are our children (subreaper). Ranks are left to their own states.
void Supervisor::reap_orphans() {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
      return;
    }
    const bool is_rank = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
      return rank.state <= RankState::kLingering && rank.started.process.pid() == info.si_pid;
    });
    if (is_rank) {
      return;  // the kernel shows the same one again; the next look comes when this rank has been reaped
    }
    ::waitid(P_PID, static_cast<id_t>(info.si_pid), &info, WEXITED | WNOHANG);
  }
}

void Supervisor::settle_ranks() {
  for (Rank& rank : ranks_) {
    RankProcess& process = rank.started.process;
    if (rank.state == RankState::kLingering && (rank.drained() || SteadyClock::now() >= rank.until)) {
      process.end_group();
      rank.started.out.drain();
      rank.started.err.drain();
      rank.state = RankState::kEnding;
      rank.until = SteadyClock::now() + kStuck;
      reap_orphans();
    }
    if (rank.state == RankState::kEnding && (process.group_is_gone() || SteadyClock::now() >= rank.until)) {
      rank.started.out.drain();
      rank.started.err.drain();
      rank.started.out.close();
      rank.started.err.close();
      rank.state = RankState::kGone;
    }
  }
}

void Supervisor::check_deadlines() {
  const TimePoint now = SteadyClock::now();
  if (timeout_at_ && now >= *timeout_at_) {
    timeout_at_.reset();
    if (stop_ == Stop::kNone) begin_stop(Stop::kTimeout);
  }
  if (terminate_at_ && now >= *terminate_at_) {
    terminate_at_.reset();
    terminate(SIGTERM);
  }
  if (kill_at_ && now >= *kill_at_) {
    kill_all();
  }
  if (stuck_at_ && now >= *stuck_at_) {
    stuck_at_.reset();
    for (Rank& rank : ranks_) {
      if (rank.state == RankState::kRunning) {
        say(fmt::format("[LAUNCH] pid {} does not end even by SIGKILL; it is left behind",
                        rank.started.process.pid()));
        rank.started.process.abandon();
        rank.state = RankState::kGone;
      }
    }
  }
}

void Supervisor::check_sinks() {
  for (const OutputSink* sink : sinks_) {
    if (sink->error_number() != 0 && stop_ == Stop::kNone) {
      output_error_ = sink->error_number();
      begin_stop(Stop::kOutputClosed);
    }
  }
}

/// Ctrl-Z: the ranks are in other process groups than the terminal's, so they are stopped and continued with
/// us.
void Supervisor::suspend() {
  signal_groups(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  signal_groups(SIGCONT);
}

void Supervisor::begin_stop(Stop reason) {
  const TimePoint now = SteadyClock::now();
  stop_ = reason;
  timeout_at_.reset();
  num_running_at_stop_ = static_cast<int>(std::count_if(
      ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.state == RankState::kRunning; }));
  if (reason == Stop::kFailure) {
    return;  // await_cause() says until when
  }
  if (reason == Stop::kSignal) {
    kill_at_ = now + options_.grace;
    terminate(stop_signal_);
  } else {
    kill_at_ = now + kTerminateGrace;
    terminate(SIGTERM);
  }
}

void Supervisor::terminate(int signal) {
  terminated_ = true;
  signal_groups(signal);
  signal_groups(SIGCONT);  // a stopped process would only die at SIGKILL
}

void Supervisor::kill_all() {
  terminated_ = true;
  terminate_at_.reset();
  kill_at_.reset();
  signal_groups(SIGKILL);
  stuck_at_ = SteadyClock::now() + kStuck;
}

void Supervisor::signal_groups(int signal) {
  for (const Rank& rank : ranks_) {
    rank.started.process.signal_group(signal);
  }
}

int Supervisor::conclude() {
  kill_at_.reset();
  terminate_at_.reset();
  stuck_at_.reset();
  timeout_at_.reset();
  const int num_ranks = static_cast<int>(ranks_.size());
  const std::string ended = num_running_at_stop_ == 1
                                ? "1 rank was ended"
                                : fmt::format("{} ranks were ended", num_running_at_stop_);
  switch (stop_) {
    case Stop::kNone:
      return 0;
    case Stop::kFailure: {
      const FailureRecord& cause = failures_[*first_cause(failures_)];
      // If the cause is not the first failure, it was still running then and the first one counts as another
      // in its place.
      say(describe(cause) + describe_others(num_running_at_stop_, num_ranks) + ".");
      return job_exit_code(cause);
    }
    case Stop::kSignal:
      say(fmt::format("stopped by signal {} ({}); {}.", stop_signal_, signal_name(stop_signal_), ended));
      return 128 + stop_signal_;
    case Stop::kTimeout:
      say(fmt::format("[{}] the job took longer than {} s; {}.",
                      slug(ErrorCode::kTimeout),
                      static_cast<double>(options_.timeout->count()) / 1000.0,
                      ended));
      return exit_code(ErrorCode::kTimeout);
    case Stop::kOutputClosed:
      say(fmt::format("[{}] the output cannot be written: {}; {}.",
                      slug(ErrorCode::kIo),
                      ::strerrordesc_np(output_error_),
                      ended));
      return output_error_ == EPIPE ? 128 + SIGPIPE : exit_code(ErrorCode::kIo);
  }
  return exit_code(ErrorCode::kInternal);
}

}  // namespace zeroth::launcher
