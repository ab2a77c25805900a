// PrivateMemory: reads memory that another process of the host does not share, by process_vm_readv.
#pragma once

#include <zeroth/comm/system_calls.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace zeroth::detail {

class PrivateMemory {
 public:
  /// `processes` of a group's ranks. Lets processes that have this one's parent read this one's memory, where Yama
  /// would not (PR_SET_PTRACER).
  PrivateMemory(std::vector<pid_t> processes, std::shared_ptr<SystemCalls> system);
  PrivateMemory(const PrivateMemory&) = delete;
  PrivateMemory& operator=(const PrivateMemory&) = delete;

  /// Where the word is that the others read to find out whether they can, and what it is.
  [[nodiscard]] std::uint64_t probe_at() const { return reinterpret_cast<std::uintptr_t>(probe_.get()); }
  [[nodiscard]] std::uint64_t probe_value() const { return *probe_; }

  /// All of `to`. 0, or an errno: EPERM where the kernel or container forbids it, ESRCH if the process has ended,
  /// EFAULT if it has given the memory back.
  [[nodiscard]] int read(int rank, std::span<std::byte> to, std::uint64_t from) const;

 private:
  std::vector<pid_t> processes_;
  std::shared_ptr<SystemCalls> system_;
  std::unique_ptr<const std::uint64_t> probe_;
};

}  // namespace zeroth::detail
