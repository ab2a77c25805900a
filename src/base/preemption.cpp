#include <zeroth/base/preemption.h>

#include <zeroth/base/error.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

namespace zeroth {
namespace {

std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

void on_sigterm(int signal) {
  if (!requested.exchange(true)) return;
  // Asked twice: as without this handler.
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

void catch_preemption() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_handler = &on_sigterm;
    action.sa_flags = SA_RESTART;
    ::sigemptyset(&action.sa_mask);
    ZR_CHECK(::sigaction(SIGTERM, &action, nullptr) == 0, ErrorCode::kResource, "sigaction failed: " + errno_text(errno), {.where = "preemption"});
  });
}

bool preemption_requested() noexcept { return requested.load(std::memory_order_relaxed); }

void request_preemption() noexcept { requested.store(true, std::memory_order_relaxed); }

}  // namespace zeroth
