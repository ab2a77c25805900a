#include "comm/shm/private_memory.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <utility>

namespace zeroth::detail {
namespace {

/// Another one in every process, so that a process that only has the pid of the right one is not taken for it.
std::uint64_t random_word() {
  std::random_device device;
  return std::uint64_t{device()} << 32U | device();
}

}  // namespace

PrivateMemory::PrivateMemory(std::vector<pid_t> processes, std::shared_ptr<SystemCalls> system)
    : processes_(std::move(processes)),
      system_(std::move(system)),
      probe_(std::make_unique<const std::uint64_t>(random_word())) {
  (void)::prctl(PR_SET_PTRACER, ::getppid(), 0, 0, 0);  // EINVAL without Yama, which is as well
}

int PrivateMemory::read(int rank, std::span<std::byte> to, std::uint64_t from) const {
  while (!to.empty()) {
    const ssize_t got = system_->read_process(processes_[static_cast<std::size_t>(rank)], to.data(), from, to.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EFAULT;
    to = to.subspan(static_cast<std::size_t>(got));
    from += static_cast<std::uint64_t>(got);
  }
  return 0;
}

}  // namespace zeroth::detail
