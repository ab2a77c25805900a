#include <zeroth/base/error.h>
#include <zeroth/base/preemption.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace zeroth {
namespace {

std::atomic<bool> requested{false};
std::atomic<std::int64_t> asked_at_ns{0};  // 0: no SIGTERM yet
std::atomic<pid_t> owner{0};  // children that it forks have the handler, too, but no step to look at the flag
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<std::int64_t>::is_always_lock_free &&
                  std::atomic<pid_t>::is_always_lock_free,
              "a signal handler writes them");

constexpr auto kLine = [] {
  std::array<char, kMakesRoom.size() + 1> line{};
  std::ranges::copy(kMakesRoom, line.begin());
  line.back() = '\n';
  return line;
}();

/// Calls only what may be called in a handler.
void on_sigterm(int signal) {
  const int error_before = errno;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t now_ns = std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  std::int64_t before_ns = 0;
  const bool ours = owner.load() == ::getpid();
  if (ours && asked_at_ns.compare_exchange_strong(before_ns, now_ns)) {
    requested.store(true);
    // One write, so that the line stays whole; where nobody can read it, it is lost.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kLine.data(), kLine.size());
  } else if (!ours || now_ns - before_ns > std::chrono::nanoseconds(kOneRequest).count()) {
    // Asked twice: as without this handler.
    std::signal(signal, SIG_DFL);
    ::raise(signal);
  }
  errno = error_before;
}

}  // namespace

void catch_preemption() {
  static std::once_flag once;
  owner = ::getpid();
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_handler = &on_sigterm;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    ZR_CHECK(::sigaction(SIGTERM, &action, nullptr) == 0, ErrorCode::kResource,
             "sigaction failed: " + errno_text(errno), {.where = "preemption"});
  });
}

bool preemption_requested() noexcept {
  return requested.load(std::memory_order_relaxed);
}

void request_preemption() noexcept {
  requested.store(true, std::memory_order_relaxed);
}

}  // namespace zeroth
