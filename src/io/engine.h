// What moves the bytes: one transfer at a time, as the kernel sees it. The queue above it resumes, checks and counts.
#pragma once

#include <zeroth/io/io_queue.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace zeroth::detail {

/// pread or pwrite of one range.
struct Transfer {
  IoOp op = IoOp::kRead;
  int descriptor = -1;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;  ///< at most kLongestTransfer
  std::uint64_t id = 0;   ///< the queue's; comes back with the result
};
/// The kernel moves at most 2 GiB - 4 KiB at once; this one is a multiple of every alignment.
inline constexpr std::size_t kLongestTransfer = std::size_t{1} << 30U;

struct TransferEnd {
  std::uint64_t id = 0;
  std::int64_t result = 0;  ///< bytes moved, or -errno
  /// When it was, where the engine knows; the default: not before it was reaped.
  SteadyClock::time_point at{};
};

/// A component: one way to have transfers carried out. One thread at a time.
class IoEngine {
 public:
  IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  /// Nothing is in flight any more.
  virtual ~IoEngine() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] virtual int depth() const = 0;
  /// Takes transfers from the front of `transfers`, and returns how many; 0 if the kernel takes none now. There are
  /// never more than depth() taken and not reaped. Throws kIo if the kernel refuses the first one for good.
  [[nodiscard]] virtual std::size_t start(std::span<const Transfer> transfers) = 0;
  /// Fills `ends` from the front with transfers that have ended, and returns how many. Waits for the first one at most
  /// `wait`; 0: does not wait. Throws kIo if the engine cannot go on.
  [[nodiscard]] virtual std::size_t reap(std::span<TransferEnd> ends, Milliseconds wait) = 0;
};

/// Each throws kIo with the reason where the kernel refuses, or nothing was built.
[[nodiscard]] std::unique_ptr<IoEngine> make_io_uring_engine(int depth, bool one_thread);
[[nodiscard]] std::unique_ptr<IoEngine> make_aio_engine(int depth);
[[nodiscard]] std::unique_ptr<IoEngine> make_thread_engine(int depth, int num_threads);
/// Plants `faults` into the transfers of `inner`.
[[nodiscard]] std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> inner,
                                                           std::shared_ptr<IoFaults> faults);

}  // namespace zeroth::detail
