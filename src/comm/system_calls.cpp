#include <zeroth/comm/system_calls.h>

#include <zeroth/base/failpoint.h>

#include <sys/mman.h>
#include <sys/syscall.h>
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
};

}  // namespace

std::shared_ptr<SystemCalls> make_system_calls() {
  return std::make_shared<KernelCalls>();
}

}  // namespace zeroth
