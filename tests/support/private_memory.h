// Kernels for tests that let a process read other processes' memory as it pleases them.
#pragma once

#include <zeroth/comm/system_calls.h>

#include <cerrno>
#include <functional>
#include <memory>
#include <utility>

namespace zeroth::test {

/// The kernel, but for reads of another process.
class ReadsOfProcesses final : public SystemCalls {
 public:
  struct Read {
    pid_t pid;
    std::byte* to;
    std::uint64_t from;
    std::size_t bytes;
  };
  using Reader = std::function<ssize_t(SystemCalls& kernel, const Read& read)>;
  explicit ReadsOfProcesses(Reader reader) : reader_(std::move(reader)) {}

  int memfd_create(const char* name, unsigned flags) override { return kernel_->memfd_create(name, flags); }
  int pidfd_open(pid_t pid) override { return kernel_->pidfd_open(pid); }
  ssize_t read_process(pid_t pid, std::byte* to, std::uint64_t from, std::size_t bytes) override {
    return reader_(*kernel_, {pid, to, from, bytes});
  }

 private:
  Reader reader_;
  std::shared_ptr<SystemCalls> kernel_ = make_system_calls();
};

/// As in a container that forbids it.
[[nodiscard]] inline std::shared_ptr<SystemCalls> kernel_without_reads() {
  return std::make_shared<ReadsOfProcesses>([](SystemCalls&, const ReadsOfProcesses::Read&) -> ssize_t {
    errno = EPERM;
    return -1;
  });
}

}  // namespace zeroth::test
