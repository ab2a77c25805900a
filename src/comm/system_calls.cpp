#include <zeroth/comm/system_calls.h>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace zeroth {
namespace {

class KernelCalls final : public SystemCalls {
 public:
  int memfd_create(const char* name, unsigned flags) override { return ::memfd_create(name, flags); }
  int pidfd_open(pid_t pid) override { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }
};

}  // namespace

std::shared_ptr<SystemCalls> make_system_calls() {
  return std::make_shared<KernelCalls>();
}

}  // namespace zeroth
