#include "launcher/agent.h"

#include "launcher/addresses.h"
#include "launcher/environment.h"
#include "launcher/local_group.h"
#include "launcher/spawn.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/base/preemption.h>
#include <zeroth/base/surroundings.h>

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::launcher {
namespace {

class Agent final : public GroupListener {
 public:
  Agent(Channel& channel, const AgentSetup& setup, SignalInbox& inbox)
      : channel_(&channel), setup_(&setup), inbox_(&inbox) {
    ZR_FAILPOINT("launcher.hello");
    channel_->send(FrameType::kHello, encode(setup.hello));
  }

  AgentEnd run() {
    while (!finished()) {
      wait_for_events();
      if (group_) group_->settle();
      take_frames();
      look_after_head();
      check_deadlines();
      report_end();
    }
    return {.job = end_};
  }

  void rank_output(int rank, Stream stream, std::string_view bytes) override {
    on_the_way_ += bytes.size();
    channel_->send(FrameType::kOutput, encode(Output{.rank = rank, .stream = stream, .bytes = bytes}));
  }
  void rank_output_ended(int rank, Stream stream) override {
    channel_->send(FrameType::kOutputEnd, encode(Output{.rank = rank, .stream = stream}));
  }
  void rank_ended(int rank, const std::string& /*host*/, pid_t pid, const ExitStatus& status) override {
    made_room_ = made_room_ || status.preempted();
    channel_->send(FrameType::kRankEnd, encode(RankEnd{.rank = rank, .pid = pid, .status = status}));
  }
  void host_failed(const std::string& /*host*/, int /*first_rank*/, int /*num_ranks*/,
                   const Error& /*error*/) override {}
  void host_note(const std::string& /*host*/, std::string_view text) override {
    channel_->send(FrameType::kNote, text);
  }
  [[nodiscard]] bool congested(Stream /*stream*/) const override { return on_the_way_ > kOutputWindow; }

 private:
  [[nodiscard]] bool group_gone() const { return !group_ || group_->gone(); }

  [[nodiscard]] bool finished() const {
    if (!group_gone()) return false;
    return head_gone_ || (end_ && channel_->pending_bytes() == 0);
  }

  void wait_for_events() {
    polled_.clear();
    polled_.push_back({.fd = inbox_->fd(), .events = POLLIN, .revents = 0});
    channel_->add_polled(polled_);
    if (group_) group_->add_polled(polled_);
    if (::poll(polled_.data(), polled_.size(), poll_timeout_ms()) <= 0) return;
    channel_->handle(polled_[1], polled_[2]);
    if (group_) group_->handle(std::span(polled_).subspan(3));
    if (polled_[0].revents != 0) {
      for (const int signal : inbox_->take()) handle_signal(signal);
    }
  }

  [[nodiscard]] int poll_timeout_ms() const {
    std::optional<TimePoint> next = channel_->next_ping();
    const auto consider = [&next](std::optional<TimePoint> point) {
      if (point && *point < *next) next = point;
    };
    if (group_) consider(group_->next());
    consider(kill_at_);
    consider(give_up_at_);
    consider(leave_at_);
    const auto left = std::chrono::ceil<Milliseconds>(*next - SteadyClock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, kPingEvery.count()));
  }

  /// Signals to the agent itself are for its ranks: an end of this host's part.
  void handle_signal(int signal) {
    if (signal == SIGCHLD) {
      if (group_) group_->look_for_exits();
    } else if (signal == SIGUSR1 || signal == SIGUSR2) {
      if (group_) group_->signal_ranks(signal);
    } else if (signal != SIGTSTP) {
      const TimePoint now = SteadyClock::now();
      if (signal == SIGTERM && stopped_at_ && now <= *stopped_at_ + kOneRequest) return;
      if (!group_ || group_->gone()) {
        // Others may still save; a second request ends the wait for them, or the time.
        if (signal != SIGTERM || !made_room_ || stopped_at_) head_gone_ = true;
        stopped_at_ = now;
        leave_at_ = now + setup_->preempt_grace;
        return;
      }
      channel_->send(FrameType::kNote, fmt::format("its agent was stopped by signal {}", signal));
      if (signal == SIGTERM && !kill_at_) {
        make_room();
      } else {
        stop_ranks(kill_at_ ? SIGKILL : signal);
      }
    }
  }

  /// [Note: Making room] in supervisor.cpp. Nodes are told one after the other: our ranks may have heard of it through
  /// the head.
  void make_room() {
    stopped_at_ = SteadyClock::now();
    kill_at_ = *stopped_at_ + setup_->preempt_grace;
    if (!std::exchange(told_to_make_room_, true)) group_->signal_ranks(SIGTERM);
    group_->signal_groups(SIGCONT);
  }

  void stop_ranks(int signal) {
    if (!group_) return;
    group_->signal_groups(signal);
    group_->signal_groups(SIGCONT);
    if (!kill_at_ && signal != SIGKILL) kill_at_ = SteadyClock::now() + kTerminateGrace;
  }

  void take_frames() {
    while (!head_gone_) {
      const std::optional<Frame> frame = channel_->next();
      if (!frame) break;
      paused_ = false;
      take(*frame);
    }
    if (channel_->ended() && !head_gone_) lose_head();
  }

  void take(const Frame& frame) {
    switch (frame.type) {
      case FrameType::kTask:
        start(decode_task(frame.payload));
        break;
      case FrameType::kSignal: {
        const SignalOrder order = decode_signal(frame.payload);
        if (!group_) break;
        if (order.groups) {
          group_->signal_groups(order.number);
        } else if (order.number != SIGTERM || !std::exchange(told_to_make_room_, true)) {
          group_->signal_ranks(order.number);
        }
        paused_ = order.groups && order.number == SIGSTOP;
        break;
      }
      case FrameType::kCredit: {
        PayloadReader reader(frame.payload);
        const auto credit = static_cast<std::size_t>(reader.number(0, std::int64_t{1} << 40));
        on_the_way_ -= std::min(on_the_way_, credit);
        break;
      }
      case FrameType::kEndedRanks:
        for (const EndedRank& rank : decode_ended_ranks(frame.payload)) {
          if (group_) group_->other_rank_ended(rank);
        }
        break;
      case FrameType::kEnd:
        end_ = decode_job_end(frame.payload);
        if (!group_gone()) stop_ranks(SIGTERM);
        break;
      case FrameType::kRefused:
        throw decode_error(frame.payload);
      case FrameType::kPing:
        break;
      default:
        throw Error(ErrorCode::kLaunch, "the head of the job said what only an agent says",
                    {.where = "zeroth-run --agent"});
    }
  }

  void start(HostTask task) {
    if (group_ || refused_) {
      throw Error(ErrorCode::kLaunch, "a second task for one agent", {.where = "zeroth-run --agent"});
    }
    try {
      ZR_FAILPOINT("launcher.task");
      if (setup_->complete) setup_->complete(task);
      if (task.command.empty())
        throw Error(ErrorCode::kLaunch, "a task without a program", {.where = "zeroth-run --agent"});
      if (!task.directory.empty() && ::chdir(task.directory.c_str()) != 0) {
        throw Error(ErrorCode::kLaunch, "the working directory is not there: " + errno_text(errno),
                    {.which = task.directory, .hint = "start zeroth-run in a directory that every host has"});
      }
      lost_after_ = Milliseconds(task.lost_after_ms);
      warn_of_loopback(task);
      const StartContext context{.inherited = &inbox_->inherited(),
                                 .descriptors = reserve_descriptors(task.num_ranks, 2)};
      group_ = std::make_unique<LocalGroup>(task, context, *this);
      channel_->send(FrameType::kStarted, encode(Started{.pids = group_->pids(), .notes = group_->notes()}));
      group_->look_for_exits();
    } catch (const Error& error) {
      refused_ = true;
      group_.reset();
      channel_->send(FrameType::kRefused, encode(error));
    }
  }

  /// Rank 0's host may know the name that the others reach it by as one of its own loopback.
  void warn_of_loopback(const HostTask& task) {
    if (task.first_rank != 0 || task.job.num_nodes == 1) return;
    std::string master = task.job.master_address;
    for (const auto& [name, value] : task.extra) {
      if (name == "MASTER_ADDR") master = value;
    }
    if (is_address(master)) return;
    if (const std::string address = address_towards(master); is_loopback(address)) {
      channel_->send(FrameType::kNote,
                     fmt::format("[LAUNCH] warning: MASTER_ADDR={} leads to loopback here ({}), where the "
                                 "other hosts are not; hint: correct /etc/hosts, or name the host by its "
                                 "address",
                                 master, address));
    }
  }

  void lose_head() {
    head_gone_ = true;
    channel_->close_out();
    kill_at_.reset();  // whoever makes room for a job that has no head any more gets no more time than others
    stop_ranks(SIGTERM);
  }

  void look_after_head() {
    watch_.turn(*channel_);
    channel_->keep_alive();
    if (!head_gone_ && !paused_ && watch_.silent_for(*channel_, lost_after_)) lose_head();
  }

  void check_deadlines() {
    const TimePoint now = SteadyClock::now();
    if (kill_at_ && now >= *kill_at_) {
      kill_at_.reset();
      if (group_) group_->signal_groups(SIGKILL);
      give_up_at_ = now + kStuck;
    }
    if (leave_at_ && now >= *leave_at_) head_gone_ = true;
    if (give_up_at_ && now >= *give_up_at_ && group_) {
      give_up_at_.reset();
      for (const std::string& who : group_->abandon()) {
        channel_->send(FrameType::kNote,
                       fmt::format("[LAUNCH] {} does not end even by SIGKILL; it is left behind", who));
      }
    }
  }

  void report_end() {
    if (!group_ || !group_->gone() || reported_) return;
    reported_ = true;
    channel_->send(FrameType::kGone);
  }

  Channel* channel_;
  const AgentSetup* setup_;
  SignalInbox* inbox_;
  SilenceWatch watch_;
  Milliseconds lost_after_ = setup_->lost_after;
  std::unique_ptr<LocalGroup> group_;
  std::optional<JobEnd> end_;
  std::size_t on_the_way_ = 0;
  bool refused_ = false;
  bool head_gone_ = false;
  bool paused_ = false;  ///< the head has been stopped with all ranks: it will be silent
  bool reported_ = false;
  bool told_to_make_room_ = false;  ///< our ranks have had SIGTERM
  bool made_room_ = false;          ///< one of them has ended so
  std::optional<TimePoint> stopped_at_;
  std::optional<TimePoint> kill_at_;
  std::optional<TimePoint> give_up_at_;
  std::optional<TimePoint> leave_at_;
  std::vector<pollfd> polled_;
};

}  // namespace

AgentEnd run_agent(Channel& channel, const AgentSetup& setup, SignalInbox& inbox) {
  return Agent(channel, setup, inbox).run();
}

}  // namespace zeroth::launcher
