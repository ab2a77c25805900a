#include "comm/shm/process_liveness.h"

#include "base/own_thread.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace zeroth::detail {
namespace {

/// Fields of /proc/<pid>/stat after the name, which may itself hold spaces and parentheses; empty if it
/// cannot be read.
std::vector<std::string> stat_fields(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  // getline, not iterators over the buffer: those throw if the process goes away between opening and reading.
  std::string text;
  std::getline(file, text, '\0');
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(std::move(field));
  return fields;
}

/// PIDFD_GET_INFO of Linux 6.15: tells how a process ended also after its parent has collected it. Declared
/// here because the installed kernel headers may be older than the kernel.
struct PidfdInfo {
  std::uint64_t mask = 0;
  std::uint64_t cgroup_id = 0;
  std::uint32_t ids[11] = {};
  std::int32_t exit_code = 0;
  std::uint32_t later_fields[2] = {};
};
constexpr std::uint64_t kPidfdInfoExit = 1U << 3U;

std::optional<int> wait_status(pid_t pid, int pidfd) {
  constexpr std::size_t kStateField = 0;
  constexpr std::size_t kExitCodeField = 49;  // field 52 of proc(5); the first two are not in the list
  const std::vector<std::string> fields = stat_fields(pid);
  if (fields.size() > kExitCodeField && fields[kStateField] == "Z") return std::atoi(fields[kExitCodeField].c_str());
  PidfdInfo info{.mask = kPidfdInfoExit};
  if (::ioctl(pidfd, _IOWR(0xFF, 11, PidfdInfo), &info) == 0 && (info.mask & kPidfdInfoExit) != 0)
    return info.exit_code;
  return std::nullopt;
}

}  // namespace

char process_state(pid_t pid) {
  const std::vector<std::string> fields = stat_fields(pid);
  return fields.empty() || fields.front().empty() ? '?' : fields.front().front();
}

std::string process_end(pid_t pid, int pidfd) {
  const std::optional<int> status = wait_status(pid, pidfd);
  if (!status) return "has ended";
  if (WIFSIGNALED(*status)) {
    const int signal = WTERMSIG(*status);
    const char* abbreviation = ::sigabbrev_np(signal);
    return fmt::format("was killed by SIG{} (signal {})", abbreviation != nullptr ? abbreviation : "?", signal);
  }
  return fmt::format("exited with code {} before the others were done", WEXITSTATUS(*status));
}

ProcessLiveness::ProcessLiveness(int rank, std::vector<JobControl*> controls, std::vector<pid_t> pids,
                                 Milliseconds frozen_after, SystemCalls& system)
    : rank_(rank), controls_(std::move(controls)), frozen_after_(frozen_after), owner_(::getpid()) {
  for (std::size_t peer_rank = 0; peer_rank < pids.size(); ++peer_rank) {
    auto peer = std::make_unique<Peer>();
    peer->pid = pids[peer_rank];
    if (static_cast<int>(peer_rank) != rank) {
      peer->pidfd = UniqueFd(system.pidfd_open(peer->pid));
      const int refused = errno;
      // Who waits for it will say so, or name the rank whose failure it ended with.
      if (!peer->pidfd && refused == ESRCH) {
        peer->death = "has ended while the job was starting";
        peer->dead.store(true);
      }
      ZR_CHECK(peer->pidfd || peer->dead.load(), ErrorCode::kResource, "pidfd_open failed: " + errno_text(refused),
               {.where = "comm.shm",
                .who = fmt::format("rank {}/{}", rank, pids.size()),
                .hint = "the container refuses this system call: allow pidfd_open in its seccomp profile"});
    }
    peers_.push_back(std::move(peer));
  }
  stop_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  ZR_CHECK(stop_, ErrorCode::kResource, "eventfd failed: " + errno_text(errno), {.where = "comm.shm"});
  thread_ = start_own_thread([this] { run(); }, "the heartbeat", {.where = "comm.shm"});
}

ProcessLiveness::~ProcessLiveness() {
  if (::getpid() != owner_) {  // a forked child has the object but not the thread: waiting for it would never end
    thread_.detach();
    return;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

std::string ProcessLiveness::identity(int world_rank) const {
  return fmt::format("pid {}", peers_[static_cast<std::size_t>(world_rank)]->pid);
}

std::string ProcessLiveness::death(int world_rank) const {
  const Peer& peer = *peers_[static_cast<std::size_t>(world_rank)];
  return peer.dead.load() ? peer.death : std::string();
}

std::string ProcessLiveness::freeze(int world_rank) const {
  const Peer& peer = *peers_[static_cast<std::size_t>(world_rank)];
  const std::int64_t silent = peer.silent_ms.load();
  if (silent < frozen_after_.count()) return {};
  const char state = process_state(peer.pid);
  const bool stopped = state == 'T' || state == 't';
  if (!stopped && silent < 3 * frozen_after_.count()) return {};
  return fmt::format("is frozen: no heartbeat for {:.1f} s, process state {}", static_cast<double>(silent) / 1000,
                     state);
}

void ProcessLiveness::run() {
  auto last = SteadyClock::now();
  Milliseconds elapsed{0};
  for (;;) {
    tick(elapsed);
    std::vector<pollfd> watched{{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
    std::vector<Peer*> owners{nullptr};
    for (const auto& peer : peers_) {
      if (!peer->pidfd || peer->dead.load()) continue;
      watched.push_back({.fd = peer->pidfd.get(), .events = POLLIN, .revents = 0});
      owners.push_back(peer.get());
    }
    ::poll(watched.data(), watched.size(), static_cast<int>(kWaitSlice.count()));
    if ((watched.front().revents & POLLIN) != 0) return;
    for (std::size_t index = 1; index < watched.size(); ++index) {
      if ((watched[index].revents & POLLIN) != 0) mark_dead(*owners[index]);
    }
    const auto now = SteadyClock::now();
    elapsed = std::min(std::chrono::duration_cast<Milliseconds>(now - last), 2 * kWaitSlice);
    last = now;
  }
}

void ProcessLiveness::tick(Milliseconds elapsed) {
  controls_[static_cast<std::size_t>(rank_)]->heartbeat.fetch_add(1);
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = *peers_[rank];
    const std::uint64_t beat = controls_[rank]->heartbeat.load();
    if (beat != peer.last_beat) {
      peer.last_beat = beat;
      peer.silent_ms.store(0);
    } else {
      peer.silent_ms.fetch_add(elapsed.count());
    }
  }
}

void ProcessLiveness::mark_dead(Peer& peer) {
  peer.death = process_end(peer.pid, peer.pidfd.get());
  peer.dead.store(true);
  SharedFlag& doorbell = controls_[static_cast<std::size_t>(rank_)]->doorbell;
  doorbell.fetch_add(1);
  futex_wake_all(doorbell);
}

}  // namespace zeroth::detail
