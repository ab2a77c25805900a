#include <zeroth/base/failpoint.h>
#include <zeroth/comm/system_calls.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace zeroth {
namespace {

class KernelCalls final : public SystemCalls {
 public:
  int memfd_create(const char* name, unsigned flags) override {
    return ZR_FAILPOINT_ERRNO("system.memfd_create") ? -1 : ::memfd_create(name, flags);
  }
  int pidfd_open(pid_t pid) override {
    return ZR_FAILPOINT_ERRNO("system.pidfd_open") ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  }
  ssize_t read_process(pid_t pid, std::byte* to, std::uint64_t from, std::size_t bytes) override {
    if (ZR_FAILPOINT_ERRNO("system.process_vm_readv")) return -1;
    const iovec here{.iov_base = to, .iov_len = bytes};
    const iovec there{.iov_base = reinterpret_cast<void*>(from),
                      .iov_len = bytes};  // NOLINT(performance-no-int-to-ptr): of another process
    return ::process_vm_readv(pid, &here, 1, &there, 1, 0);
  }
};

}  // namespace

std::shared_ptr<SystemCalls> make_system_calls() {
  return std::make_shared<KernelCalls>();
}

}  // namespace zeroth
