#include "launcher/remote_group.h"

#include "launcher/agent.h"

#include <zeroth/base/failpoint.h>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace zeroth::launcher {
namespace {

/// After so long without a word a host is in doubt: no other explanation of a failure is final until it has
/// spoken, or is lost.
constexpr Milliseconds kDoubtAfter{3 * kPingEvery};

/// What an agent reads of a rank's two pipes once the window is full: at the rank's end all that is in them
/// (a MiB each at most).
constexpr std::size_t kOverWindowBytes = std::size_t{4} << 20;

/// Ends of ranks go to each host together: a thousand ranks that end in a moment are one frame a host.
constexpr Milliseconds kTellEndedEvery{100};

/// Credit is given in parts of this size, not for every line.
constexpr std::size_t kCreditBytes = std::size_t{64} << 10;

}  // namespace

RemoteGroup::RemoteGroup(std::unique_ptr<AgentLink> link, const HostTask& task, GroupListener& listener,
                         Milliseconds lost_after, bool quiet)
    : link_(std::move(link)),
      listener_(&listener),
      first_rank_(task.first_rank),
      lost_after_(lost_after),
      quiet_(quiet),
      ended_(static_cast<std::size_t>(task.num_ranks)),
      num_running_(task.num_ranks) {
  link_->set_say([this](std::string_view line) { listener_->host_note(link_->host(), line); });
  ZR_FAILPOINT("launcher.order");
  link_->channel().send(FrameType::kTask, encode(task));
}

void RemoteGroup::add_polled(std::vector<pollfd>& polled) const {
  if (!closed_) link_->add_polled(polled);
}

void RemoteGroup::handle(std::span<const pollfd> polled) {
  if (polled.empty()) return;
  link_->handle(polled);
  take_frames();
}

void RemoteGroup::look_for_exits() {
  if (!closed_) link_->look_for_exit();
}

void RemoteGroup::take_frames() {
  try {
    while (!closed_) {
      const std::optional<Frame> frame = link_->next();
      if (!frame) return;
      if (!gone()) take(*frame);
    }
  } catch (const Error& error) {
    fail(error);
  }
}

std::size_t RemoteGroup::local(int rank) const {
  const int index = rank - first_rank_;
  if (index < 0 || index >= static_cast<int>(ended_.size())) {
    throw Error(ErrorCode::kLaunch, "an agent speaks of a rank that it does not have",
                {.got = fmt::format("rank {}", rank)});
  }
  return static_cast<std::size_t>(index);
}

void RemoteGroup::take(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kStarted: {
      Started started = decode_started(frame.payload);
      if (state_ != State::kStarting || started.pids.size() != ended_.size()) {
        throw Error(
            ErrorCode::kLaunch, "an agent has started what it was not told to",
            {.expected = fmt::format("{} ranks", ended_.size()), .got = fmt::format("{} ranks", started.pids.size())});
      }
      pids_ = std::move(started.pids);
      state_ = State::kRunning;
      for (const std::string& note : started.notes) {
        if (!quiet_) listener_->host_note(link_->host(), note);
      }
      break;
    }
    case FrameType::kRefused:
      end_badly(decode_error(frame.payload));  // the agent lives and waits for the end of the job
      break;
    case FrameType::kOutput: {
      const Output output = decode_output(frame.payload);
      (void)local(output.rank);
      uncredited_bytes_ += output.bytes.size();
      if (uncredited_bytes_ > kOutputWindow + ended_.size() * kOverWindowBytes) {
        throw Error(ErrorCode::kLaunch, "an agent sends more output than it may");
      }
      listener_->rank_output(output.rank, output.stream, output.bytes);
      give_credit();
      break;
    }
    case FrameType::kOutputEnd: {
      const Output output = decode_output(frame.payload);
      (void)local(output.rank);
      listener_->rank_output_ended(output.rank, output.stream);
      break;
    }
    case FrameType::kRankEnd: {
      const RankEnd end = decode_rank_end(frame.payload);
      finish_rank(end.rank, end);
      break;
    }
    case FrameType::kGone:
      num_running_ = 0;
      state_ = State::kGone;
      break;
    case FrameType::kNote:
      link_->pass_on(printable(frame.payload));
      break;
    case FrameType::kPing:
      break;
    default:
      throw Error(ErrorCode::kLaunch, "an agent said what only the head of a job says");
  }
}

void RemoteGroup::finish_rank(int rank, const RankEnd& end) {
  const std::size_t index = local(rank);
  if (ended_[index]) {
    throw Error(ErrorCode::kLaunch, "a rank has ended twice", {.got = fmt::format("rank {}", rank)});
  }
  ended_[index] = true;
  --num_running_;
  listener_->rank_ended(rank, link_->host(), end.pid, end.status);
}

void RemoteGroup::give_credit() {
  if (uncredited_bytes_ < kCreditBytes || listener_->congested(Stream::kOut) || listener_->congested(Stream::kErr)) {
    return;
  }
  link_->channel().send(FrameType::kCredit,
                        PayloadWriter().number(static_cast<std::int64_t>(uncredited_bytes_)).take());
  uncredited_bytes_ = 0;
}

void RemoteGroup::settle() {
  if (closed_) return;
  give_credit();
  tell_ended();
  Channel& channel = link_->channel();
  watch_.turn(channel);
  channel.keep_alive();
  if (link_->ended()) {
    const bool started = state_ != State::kStarting;
    fail(Error(started ? ErrorCode::kPeerLost : ErrorCode::kLaunch,
               started ? "the connection to the host has ended" : "the host's ranks were not started",
               {.got = link_->why_ended()}));
  } else if (watch_.silent_for(channel, lost_after_)) {
    fail(Error(ErrorCode::kPeerLost,
               fmt::format("no word from the host for {:g} s", static_cast<double>(lost_after_.count()) / 1000),
               {.hint = "the network to it is cut, or it hangs"}));
  }
}

std::optional<TimePoint> RemoteGroup::next() const {
  if (closed_) {
    return std::nullopt;
  }
  const TimePoint ping = link_->channel().next_ping();
  const TimePoint told = ended_elsewhere_.empty() ? ping : tell_ended_at_;
  return std::min({ping, link_->next_change().value_or(ping), told});
}

void RemoteGroup::signal_groups(int signal) {
  if (!gone()) link_->channel().send(FrameType::kSignal, encode(SignalOrder{.number = signal}));
}

void RemoteGroup::signal_ranks(int signal) {
  if (!gone()) link_->channel().send(FrameType::kSignal, encode(SignalOrder{.number = signal, .groups = false}));
}

void RemoteGroup::other_rank_ended(const EndedRank& rank) {
  if (num_running_ == 0) return;  // nobody is left there to read it
  if (ended_elsewhere_.empty()) tell_ended_at_ = SteadyClock::now() + kTellEndedEvery;
  ended_elsewhere_.push_back(rank);
}

void RemoteGroup::tell_ended() {
  if (ended_elsewhere_.empty() || SteadyClock::now() < tell_ended_at_) return;
  const std::vector<EndedRank> ended = std::exchange(ended_elsewhere_, {});
  if (num_running_ > 0) link_->channel().send(FrameType::kEndedRanks, encode(ended));
}

std::vector<std::string> RemoteGroup::abandon() {
  if (gone()) {
    return {};
  }
  const std::string who = fmt::format("host {}", link_->host());
  num_running_ = 0;
  state_ = State::kGone;
  closed_ = true;
  link_->kill();
  return {who};
}

std::optional<TimePoint> RemoteGroup::in_doubt_until() const {
  const TimePoint heard = link_->channel().last_heard();
  if (gone() || SteadyClock::now() < heard + kDoubtAfter) {
    return std::nullopt;
  }
  return heard + lost_after_ + kPingEvery;
}

void RemoteGroup::end_job(const JobEnd& end) {
  if (!closed_) link_->channel().send(FrameType::kEnd, encode(end));
}

void RemoteGroup::fail(const Error& error) {
  if (closed_) return;
  closed_ = true;
  link_->kill();
  end_badly(error);
}

void RemoteGroup::end_badly(const Error& error) {
  if (gone()) return;
  num_running_ = 0;
  state_ = State::kGone;
  listener_->host_failed(link_->host(), first_rank_, static_cast<int>(ended_.size()), error);
}

}  // namespace zeroth::launcher
