// The system calls that a container may refuse, behind an interface so that tests can refuse them.
#pragma once

#include <sys/types.h>

#include <memory>

namespace zeroth {

/// Each returns a new descriptor, or -1 with errno set.
class SystemCalls {
 public:
  SystemCalls() = default;
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;
  virtual ~SystemCalls() = default;

  /// memfd_create(name, flags)
  [[nodiscard]] virtual int memfd_create(const char* name, unsigned flags) = 0;
  /// pidfd_open(pid, 0): readable when the process has ended.
  [[nodiscard]] virtual int pidfd_open(pid_t pid) = 0;
};

[[nodiscard]] std::shared_ptr<SystemCalls> make_system_calls();

}  // namespace zeroth
