#include "launcher/local_group.h"

#include "launcher/cores.h"
#include "launcher/environment.h"
#include "launcher/oom.h"
#include "launcher/program.h"
#include "launcher/spawn.h"

#include <zeroth/base/failpoint.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <string>
#include <utility>

namespace zeroth::launcher {
namespace {

// [Note: End of a rank] A rank goes through kRunning -> kLingering (it has ended, its pipes may hold more) ->
// kEnding (its group got SIGKILL, the leader is reaped, members that became our children are being reaped) ->
// kGone. The launcher is a subreaper, so the orphans of a group are its children and "nothing is left" is
// something that it can wait for. A process that has left its group (setsid) becomes our child, too, when its parent
// ends: after the last rank every child that we did not have before gets SIGKILL, until there is none.

constexpr std::size_t kBlockBytes = std::size_t{64} << 10;
constexpr Milliseconds kSweepEvery{20};  // their ends wake us; this is for what no signal tells
constexpr std::array kStreams{Stream::kOut, Stream::kErr};

constexpr std::size_t index_of(Stream stream) {
  return static_cast<std::size_t>(stream);
}

/// None where the kernel does not say (CONFIG_PROC_CHILDREN).
std::vector<pid_t> children() {
  std::vector<pid_t> result;
  std::ifstream file("/proc/self/task/" + std::to_string(::getpid()) + "/children");
  for (pid_t pid = 0; file >> pid;) result.push_back(pid);
  return result;
}

}  // namespace

LocalGroup::LocalGroup(const HostTask& task, const StartContext& context, GroupListener& listener)
    : listener_(&listener),
      board_(task.job.job_id, task.job.num_ranks),
      oom_kills_(count_oom_kills()),
      before_(children()) {
  Program program = program_of(task.command, task.environment);
  if (!program.note.empty()) notes_.push_back(std::move(program.note));
  SpawnPlan plan{.program = std::move(program.file),
                 .arguments = std::move(program.arguments),
                 .descriptors = context.descriptors};
  const int cores = count_cores();
  const int threads = threads_per_rank(task, cores);
  if (threads > 0) {
    notes_.push_back(
        fmt::format("OMP_NUM_THREADS={} in every rank ({} cores, {} ranks)", threads, cores, task.num_ranks));
  }
  std::vector<std::vector<int>> shares = plan_binding(task.bind, task.num_ranks);
  // Who asks for more threads than that share of the cores wants more of them.
  if (task.bind == BindCores::kAuto && !shares.empty() &&
      chosen_threads(task) > static_cast<int>(shares.front().size()))
    shares.clear();
  if (!shares.empty()) {
    notes_.push_back(fmt::format(
        "every rank on cores of its own: {} on {}, ..., {} on {} (--bind-cores off leaves them free)", task.first_rank,
        describe_processors(shares.front()), task.first_rank + task.num_ranks - 1, describe_processors(shares.back())));
  }
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ranks_.reserve(static_cast<std::size_t>(task.num_ranks));
  for (int local_rank = 0; local_rank < task.num_ranks; ++local_rank) {
    const int rank = task.first_rank + local_rank;
    plan.environment = rank_environment(task, local_rank, threads);
    if (const std::string board = board_.path(); !board.empty())
      plan.environment.push_back(fmt::format("{}={}", kEndedRanksVariable, board));
    if (!shares.empty()) {
      plan.processors = shares[static_cast<std::size_t>(local_rank)];
      plan.environment.push_back(fmt::format("{}={}", kBoundVariable, plan.processors.size()));
    }
    plan.stdin_fd = rank == 0 && context.stdin_fd >= 0 ? context.stdin_fd : nothing.get();
    SpawnedRank spawned = spawn_rank(plan, *context.inherited);
    keeper_.watch(spawned.process.pid());
    ranks_.push_back({.number = rank,
                      .process = std::move(spawned.process),
                      .pipes = {std::move(spawned.out), std::move(spawned.err)}});
  }
}

std::vector<int> LocalGroup::pids() const {
  std::vector<int> result;
  for (const Rank& rank : ranks_) result.push_back(rank.process.pid());
  return result;
}

void LocalGroup::add_polled(std::vector<pollfd>& polled) const {
  for (const Rank& rank : ranks_) {
    for (const Stream stream : kStreams) {
      // poll leaves negative descriptors out.
      const int fd = listener_->congested(stream) ? -1 : rank.pipes[index_of(stream)].get();
      polled.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    }
  }
}

void LocalGroup::handle(std::span<const pollfd> polled) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    for (const Stream stream : kStreams) {
      if (polled[2 * i + index_of(stream)].revents != 0) read_some(ranks_[i], stream);
    }
  }
}

void LocalGroup::look_for_exits() {
  for (Rank& rank : ranks_) {
    if (rank.state != State::kRunning) continue;
    if (const auto status = rank.process.exit_status()) {
      // What it wrote before it ended is in the pipes by now, the error line too.
      drain(rank);
      rank.state = State::kLingering;
      rank.until = SteadyClock::now() + kLinger;
      if (status->signal == SIGKILL) explain_kill(rank);
      listener_->rank_ended(rank.number, "", rank.process.pid(), *status);
    }
  }
  reap_orphans();
}

void LocalGroup::explain_kill(const Rank& rank) {
  const std::optional<std::int64_t> now = count_oom_kills();
  if (oom_kills_ && now && *now > *oom_kills_) {
    listener_->host_note(
        "",
        fmt::format("[OUT_OF_MEMORY] the kernel has ended a process for lack of memory, most likely rank {} (pid {}); "
                    "got: oom_kill {} of "
                    "the memory cgroup, {} before; hint: give the job more memory, or start fewer ranks on this host",
                    rank.number, rank.process.pid(), *now, *oom_kills_));
  }
  oom_kills_ = now;
}

void LocalGroup::reap_orphans() {
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
      return;
    }
    const bool is_rank = std::ranges::any_of(ranks_, [&info](const Rank& rank) {
      return rank.state <= State::kLingering && rank.process.pid() == info.si_pid;
    });
    if (is_rank) {
      return;  // the kernel shows the same one again; the next look comes when this rank has been reaped
    }
    ::waitid(P_PID, static_cast<id_t>(info.si_pid), &info, WEXITED | WNOHANG);
  }
}

void LocalGroup::settle() {
  for (Rank& rank : ranks_) {
    if (rank.state == State::kLingering && (rank.drained() || SteadyClock::now() >= rank.until)) {
      keeper_.forget(rank.process.pid());
      rank.process.end_group();
      drain(rank);
      rank.state = State::kEnding;
      rank.until = SteadyClock::now() + kStuck;
      reap_orphans();
    }
    if (rank.state == State::kEnding && (rank.process.group_is_gone() || SteadyClock::now() >= rank.until)) {
      drain(rank);
      for (const Stream stream : kStreams) close(rank, stream);
      rank.state = State::kGone;
    }
  }
  if (!swept_ && std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.state == State::kGone; })) sweep();
}

void LocalGroup::sweep() {
  const TimePoint now = SteadyClock::now();
  if (sweep_until_ == TimePoint{}) sweep_until_ = now + kStuck;
  reap_orphans();
  swept_ = true;
  for (const pid_t pid : children()) {
    if (std::ranges::find(before_, pid) != before_.end()) continue;
    ::kill(pid, SIGKILL);  // and its children become ours
    swept_ = now >= sweep_until_;
  }
}

std::optional<TimePoint> LocalGroup::next() const {
  std::optional<TimePoint> first;
  if (sweep_until_ != TimePoint{} && !swept_) first = SteadyClock::now() + kSweepEvery;
  for (const Rank& rank : ranks_) {
    const bool due = rank.state == State::kLingering || rank.state == State::kEnding;
    if (due && (!first || rank.until < *first)) first = rank.until;
  }
  return first;
}

void LocalGroup::signal_groups(int signal) {
  for (const Rank& rank : ranks_) rank.process.signal_group(signal);
}

void LocalGroup::signal_ranks(int signal) {
  for (const Rank& rank : ranks_) rank.process.signal_leader(signal);
}

std::vector<std::string> LocalGroup::abandon() {
  std::vector<std::string> left;
  for (Rank& rank : ranks_) {
    if (rank.state == State::kRunning) {
      left.push_back(fmt::format("pid {}", rank.process.pid()));
      rank.process.abandon();
      rank.state = State::kGone;
      swept_ = true;  // it stays our child
    }
  }
  return left;
}

int LocalGroup::num_running() const {
  return static_cast<int>(
      std::ranges::count_if(ranks_, [](const Rank& rank) { return rank.state == State::kRunning; }));
}

bool LocalGroup::gone() const {
  return swept_ && std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.state == State::kGone; });
}

std::size_t LocalGroup::read_some(Rank& rank, Stream stream) {
  const UniqueFd& pipe = rank.pipes[index_of(stream)];
  if (!pipe.valid()) {
    return 0;
  }
  std::array<char, kBlockBytes> block;
  const ssize_t bytes = ::read(pipe.get(), block.data(), block.size());
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
    return 0;
  }
  if (bytes <= 0) {
    close(rank, stream);
    return 0;
  }
  ZR_FAILPOINT("launcher.output");
  listener_->rank_output(rank.number, stream, std::string_view(block.data(), static_cast<std::size_t>(bytes)));
  return static_cast<std::size_t>(bytes);
}

void LocalGroup::drain(Rank& rank) {
  for (const Stream stream : kStreams) {
    int available = 0;
    const UniqueFd& pipe = rank.pipes[index_of(stream)];
    if (!pipe.valid() || ::ioctl(pipe.get(), FIONREAD, &available) != 0) {
      continue;
    }
    std::size_t bytes = 1;
    for (auto left = static_cast<std::size_t>(available); left > 0 && bytes > 0; left -= std::min(left, bytes)) {
      bytes = read_some(rank, stream);
    }
    if (bytes > 0) read_some(rank, stream);  // finds the end of the stream, if this is it
  }
}

void LocalGroup::close(Rank& rank, Stream stream) {
  UniqueFd& pipe = rank.pipes[index_of(stream)];
  if (pipe.valid()) {
    pipe.reset();
    listener_->rank_output_ended(rank.number, stream);
  }
}

}  // namespace zeroth::launcher
