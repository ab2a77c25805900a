#include "launcher/supervisor.h"

#include "launcher/records.h"

#include <zeroth/base/error.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <span>
#include <utility>

namespace zeroth::launcher {

// [Note: End of a job] How one rank ends is its group's affair ([Note: End of a rank] in local_group.cpp).
// The job as a whole is stopped for one reason (Stop), the first that comes:
//   failure        a rank ended badly: wait for a better explanation (kCauseWindow; kEchoWindow while all
//                  failures name another rank; not at all if there can be none), SIGTERM to all, SIGKILL
//                  kTerminateGrace later
//   signal         Ctrl-C, SIGTERM, SIGHUP, SIGQUIT to us: passed on, SIGKILL after options.grace or at the
//                  next such signal ([Note: Making room] for SIGTERM)
//   timeout        SIGTERM, SIGKILL after kTerminateGrace
//   output closed  nobody reads our output any more: the same
// A rank that exits with 0 or kExitPreempted early is no failure here; its peers notice and say so.

// [Note: Making room] A rank that catches SIGTERM to save first (zeroth/base/preemption.h) says so in a line at once,
// and by its exit code in the end. Then
//   - SIGKILL waits for options.preempt_grace, since the ranks agree at their next step only, and one may save for all;
//   - SIGTERM goes to the ranks alone: a loader process that it ended would be a failure of its rank, and children end
//   with their rank
//     anyway. It goes to them once: the second ends them. SIGTERM to us within kOneRequest of the first is the same
//     request;
//   - the job is not started again here, even if a rank fails on the way: somebody wants the machine.

namespace {

constexpr std::size_t index_of(Stream stream) {
  return static_cast<std::size_t>(stream);
}

/// "; details: logs/trace-rank1.jsonl", where a rank has left a record.
std::string details_of(const Options& options, const FailureRecord& cause) {
  const std::string record =
      options.log_directory.empty() ? "" : find_record(options.log_directory, cause.rank, options.num_ranks);
  return record.empty() ? "" : "; details: " + record;
}

}  // namespace

Supervisor::Supervisor(const Options& options, const Console& console, const Attempt& attempt)
    : options_(options),
      attempt_(attempt),
      inbox_(&console.inbox),
      sinks_{&console.out, &console.err},
      mergers_{LineMerger(console.out, options.num_ranks, options.site_mark()),
               LineMerger(console.err, options.num_ranks, options.site_mark())},
      timeout_at_(attempt.timeout.at) {
  if (!options.log_directory.empty()) forget_records(options.log_directory, options.num_ranks);
  outputs_.reserve(2 * static_cast<std::size_t>(options.num_ranks));
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    for (const Stream stream : {Stream::kOut, Stream::kErr}) {
      LineMerger& merger = mergers_[sinks_[index_of(stream)] == sinks_[0] ? 0 : 1];
      LineStyle style{.prefix = options.prefix ? fmt::format("[{}{}] ", options.site_mark(), rank) : "",
                      .pass_through = !options.prefix && options.num_ranks == 1};
      if (options.merge && options.num_ranks > 1) {
        style = {.taker = [&merger, rank](std::string_view line) { merger.add(rank, line, SteadyClock::now()); }};
      }
      const char* name = stream == Stream::kOut ? "stdout" : "stderr";
      outputs_.emplace_back(
          *sinks_[index_of(stream)], std::move(style),
          options.log_directory.empty() ? "" : fmt::format("{}/rank{}.{}.log", options.log_directory, rank, name),
          attempt.restart > 0);
    }
  }
}

void Supervisor::say(std::string_view text) {
  write_notes();
  write(text);
}

void Supervisor::write_notes(TimePoint now) {
  for (const std::string& note : notes_.take(now)) write(note);
}

void Supervisor::write(std::string_view text) {
  for (LineMerger& merger : mergers_) merger.flush_all();
  const std::string site = options_.site < 0 ? "" : fmt::format("site {}: ", options_.site);
  sinks_[1]->queue() += fmt::format("zeroth-run: {}{}\n", site, text);
}

JobEnd Supervisor::run() {
  // A rank may have ended before the first look; its SIGCHLD may have been merged with another.
  look_for_exits();
  settle_groups();
  while (!ranks_gone()) {
    flush_sinks();
    wait_for_events();
    settle_groups();
    check_sinks();
    check_deadlines();
    settle_groups();
  }
  const JobEnd end = conclude();
  end_groups(end);
  write_notes();
  for (LineMerger& merger : mergers_) merger.flush_all();
  flush_sinks();
  while (!abandon_output_ && (sinks_[0]->pending() > 0 || sinks_[1]->pending() > 0)) {
    wait_for_events();
    flush_sinks();
  }
  return end;
}

/// Every host is told, and gets a moment to leave by itself.
void Supervisor::end_groups(const JobEnd& end) {
  const auto all_closed = [this] {
    return std::ranges::all_of(groups_, [](const auto& group) { return group->closed(); });
  };
  for (const auto& group : groups_) group->end_job(end);
  // terminate_at_ is no deadline of its own any more; it only ends the wait for events.
  terminate_at_ = SteadyClock::now() + kFarewell;
  while (!all_closed() && SteadyClock::now() < *terminate_at_) {
    flush_sinks();
    wait_for_events();
    settle_groups();
  }
  terminate_at_.reset();
}

void Supervisor::flush_sinks() {
  const TimePoint now = SteadyClock::now();
  write_notes(now);
  for (LineMerger& merger : mergers_) merger.flush(now);
  for (OutputSink* sink : sinks_) {
    sink->flush_some();
  }
}

bool Supervisor::ranks_gone() const {
  return std::ranges::all_of(groups_, [](const auto& group) { return group->gone(); });
}

RankOutput& Supervisor::output_of(int rank, Stream stream) {
  return outputs_[2 * static_cast<std::size_t>(rank) + index_of(stream)];
}

void Supervisor::rank_output(int rank, Stream stream, std::string_view bytes) {
  RankOutput& output = output_of(rank, stream);
  output.feed(bytes);
  if (const std::string failure = output.take_failure(); !failure.empty()) say(failure);
  if (output.makes_room() && !told_to_make_room_) {
    told_to_make_room_ = true;
    grant_room();
  }
}

void Supervisor::rank_output_ended(int rank, Stream stream) {
  output_of(rank, stream).finish();
}

bool Supervisor::congested(Stream stream) const {
  return sinks_[index_of(stream)]->congested();
}

void Supervisor::host_note(const std::string& host, std::string_view text) {
  host.empty() ? say(text) : notes_.add(host, text, SteadyClock::now());
}

void Supervisor::wait_for_events() {
  polled_.clear();
  polled_.push_back({.fd = inbox_->fd(), .events = POLLIN, .revents = 0});
  for (const OutputSink* sink : sinks_) {
    polled_.push_back({.fd = sink->pending() > 0 ? sink->fd() : -1, .events = POLLOUT, .revents = 0});
  }
  polled_.push_back({.fd = relay_.active() ? relay_.poll_fd() : -1, .events = relay_.poll_events(), .revents = 0});
  std::vector<std::size_t> ends{polled_.size()};
  for (const auto& group : groups_) {
    group->add_polled(polled_);
    ends.push_back(polled_.size());
  }
  if (::poll(polled_.data(), polled_.size(), poll_timeout_ms()) <= 0) {
    return;
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    groups_[i]->handle(std::span(polled_).subspan(ends[i], ends[i + 1] - ends[i]));
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
      look_for_exits();
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
  consider(notes_.next());
  for (const LineMerger& merger : mergers_) consider(merger.next());
  for (const auto& group : groups_) consider(group->next());
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
      for (const auto& group : groups_) group->signal_ranks(signal);
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
  } else if (signal != SIGTERM || stop_signal_ != SIGTERM || SteadyClock::now() > stopped_at_ + kOneRequest) {
    kill_all();
  }
}

void Supervisor::look_for_exits() {
  for (const auto& group : groups_) group->look_for_exits();
}

void Supervisor::rank_ended(int rank, const std::string& host, pid_t pid, const ExitStatus& status) {
  if (rank == 0) {
    relay_.close();
  }
  attempt_.log->rank_end(rank, host, pid, status);
  if (status.ok() || status.preempted()) {
    ++num_well_ended_;
    num_preempted_ += status.preempted() ? 1 : 0;
    for (const auto& group : groups_) {
      group->other_rank_ended({.rank = rank,
                               .pid = pid,
                               .exit_code = status.exit_code,
                               .host = host.empty() && groups_.size() > 1 ? host_name() : host});
    }
    grant_room();
    return;
  }
  const std::string& line = output_of(rank, Stream::kErr).last_error_line();
  record({.rank = rank,
          .pid = pid,
          .exit_code = status.exit_code,
          .signal = status.signal,
          .core_dumped = status.core_dumped,
          .error_line = line.empty() ? output_of(rank, Stream::kOut).last_error_line() : line,
          .host = host});
}

void Supervisor::host_failed(const std::string& host, int first_rank, int num_ranks, const Error& error) {
  record({.rank = first_rank,
          .exit_code = exit_code(error.code()),
          .error_line = error.what(),
          .host = host,
          .num_ranks = num_ranks});
}

void Supervisor::record(FailureRecord failure) {
  if (terminated_ || (stop_ != Stop::kNone && stop_ != Stop::kFailure)) {
    return;
  }
  failure.when = SteadyClock::now();
  failures_.push_back(std::move(failure));
  if (stop_ == Stop::kNone) {
    begin_stop(Stop::kFailure);
  }
  await_cause();
}

/// While all failures are such as the loss of another rank makes, and a host is silent, that host may be the
/// cause.
std::optional<TimePoint> Supervisor::doubt() const {
  const bool explained = std::ranges::any_of(failures_, [](const FailureRecord& failure) {
    const FailureClass failure_class = classify(failure);
    return !is_echo(failure_class) && failure_class != FailureClass::kTimeout;
  });
  std::optional<TimePoint> until;
  for (const auto& group : groups_) {
    const auto point = explained ? std::nullopt : group->in_doubt_until();
    if (point && *point > SteadyClock::now()) until = std::max(until.value_or(*point), *point);
  }
  return until;
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

/// Those who make room after SIGTERM, or after Ctrl-C, get the time for it.
void Supervisor::grant_room() {
  if (makes_room() && kill_at_ && stop_ == Stop::kSignal && (stop_signal_ == SIGTERM || stop_signal_ == SIGINT))
    kill_at_ = stopped_at_ + std::max(options_.grace, options_.preempt_grace);
}

/// All have ended as they wanted, and some ask to be started again.
bool Supervisor::preempted() const {
  return (stop_ == Stop::kNone || stop_ == Stop::kSignal) && num_preempted_ > 0 &&
         num_well_ended_ == options_.num_ranks;
}

void Supervisor::settle_groups() {
  for (const auto& group : groups_) group->settle();
}

void Supervisor::check_deadlines() {
  const TimePoint now = SteadyClock::now();
  if (timeout_at_ && now >= *timeout_at_) {
    timeout_at_.reset();
    if (stop_ == Stop::kNone) begin_stop(Stop::kTimeout);
  }
  if (terminate_at_ && now >= *terminate_at_) {
    terminate_at_ = doubt();
    if (terminate_at_) {
      kill_at_ = *terminate_at_ + kTerminateGrace;
    } else {
      terminate(SIGTERM);
    }
  }
  if (kill_at_ && now >= *kill_at_) {
    kill_all();
  }
  if (stuck_at_ && now >= *stuck_at_) {
    stuck_at_.reset();
    for (const auto& group : groups_) {
      for (const std::string& who : group->abandon()) {
        say(fmt::format("[LAUNCH] {} does not end even by SIGKILL; it is left behind", who));
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
  stopped_at_ = now;
  timeout_at_.reset();
  num_running_at_stop_ = 0;
  for (const auto& group : groups_) num_running_at_stop_ += group->num_running();
  if (reason == Stop::kFailure) {
    return;  // await_cause() says until when
  }
  if (reason == Stop::kSignal) {
    kill_at_ = now + options_.grace;
    grant_room();
    terminate(stop_signal_);
  } else {
    kill_at_ = now + kTerminateGrace;
    terminate(SIGTERM);
  }
}

void Supervisor::terminate(int signal) {
  terminated_ = true;
  if (stop_ != Stop::kSignal || signal != SIGTERM) {
    signal_groups(signal);
  } else if (!told_to_make_room_) {
    for (const auto& group : groups_) group->signal_ranks(signal);
  }
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
  for (const auto& group : groups_) group->signal_groups(signal);
}

/// What the other ranks have written about it.
std::string Supervisor::said_of(const FailureRecord& cause) {
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    for (const Stream stream : {Stream::kErr, Stream::kOut}) {
      if (rank == cause.rank) continue;
      if (std::string said = launcher::said_of(cause, output_of(rank, stream).last_error_line()); !said.empty())
        return said;
    }
  }
  // Python repeats what a script has given to sys.exit(), and other programs say why they end.
  const std::string& last = output_of(cause.rank, Stream::kErr).last_line();
  return cause.error_line.empty() && cause.signal == 0 && cause.num_ranks == 0 && !last.empty()
             ? ", its last line of stderr: " + last
             : "";
}

JobEnd Supervisor::conclude() {
  kill_at_.reset();
  terminate_at_.reset();
  stuck_at_.reset();
  timeout_at_.reset();
  const std::string ended =
      num_running_at_stop_ == 1 ? "1 rank was ended" : fmt::format("{} ranks were ended", num_running_at_stop_);
  if (preempted()) {
    const JobEnd end{
        kExitPreempted, false,
        fmt::format(
            "preempted: {} of {} ranks ended with exit code {}, the others with 0; start the job again to go on.",
            num_preempted_, options_.num_ranks, kExitPreempted)};
    say(end.text);
    return end;
  }
  JobEnd end;
  switch (stop_) {
    case Stop::kNone:
      return end;
    case Stop::kFailure: {
      const FailureRecord& cause = failures_[*first_cause(failures_)];
      // If the cause is not the first failure, it was still running then and the first one counts as another
      // in its place.
      end = {job_exit_code(cause), attempt_.restart < options_.max_restarts && !makes_room(),
             describe(cause) + said_of(cause) + describe_others(num_running_at_stop_, options_.num_ranks) +
                 details_of(options_, cause) + "."};
      break;
    }
    case Stop::kSignal:
      end = {128 + stop_signal_, false,
             fmt::format("stopped by signal {} ({}); {}{}.", stop_signal_, signal_name(stop_signal_), ended,
                         makes_room()
                             ? fmt::format("; {} had made room; hint: --preempt-grace gives more time", num_preempted_)
                             : "")};
      break;
    case Stop::kTimeout:
      end = {exit_code(ErrorCode::kTimeout), false,
             fmt::format("[{}] the job took longer than {} s; {}.", slug(ErrorCode::kTimeout),
                         static_cast<double>(options_.timeout->count()) / 1000.0, ended)};
      break;
    case Stop::kOutputClosed:
      end = {output_error_ == EPIPE ? 128 + SIGPIPE : exit_code(ErrorCode::kIo), false,
             fmt::format("[{}] the output cannot be written: {}; {}.", slug(ErrorCode::kIo),
                         ::strerrordesc_np(output_error_), ended)};
      break;
  }
  say(end.text);
  if (stop_ == Stop::kFailure) attempt_.log->first_cause(failures_[*first_cause(failures_)], end.text);
  return end;
}

}  // namespace zeroth::launcher
