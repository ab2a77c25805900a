// The system calls that a container may refuse, behind an interface, so that tests can refuse them too.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace zeroth {

/// Each returns -1 with errno set if the kernel refuses.
class SystemCalls {
 public:
  SystemCalls() = default;
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;
  virtual ~SystemCalls() = default;

  /// memfd_create(name, flags): a new descriptor.
  [[nodiscard]] virtual int memfd_create(const char* name, unsigned flags) = 0;
  /// pidfd_open(pid, 0): a new descriptor, readable when the process has ended.
  [[nodiscard]] virtual int pidfd_open(pid_t pid) = 0;
  /// process_vm_readv of one range. Returns the number of bytes read, which may be less than `bytes`.
  [[nodiscard]] virtual ssize_t read_process(pid_t pid, std::byte* to, std::uint64_t from, std::size_t bytes) = 0;
};

[[nodiscard]] std::shared_ptr<SystemCalls> make_system_calls();

}  // namespace zeroth
