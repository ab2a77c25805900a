#include "io/engine.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>

namespace zeroth::detail {
namespace {

// By value: headers of older distributions lack them, the kernel that runs may know them.
constexpr unsigned kCoopTaskrun = 1U << 8U;    // since Linux 5.19
constexpr unsigned kSingleIssuer = 1U << 12U;  // 6.0
constexpr unsigned kDeferTaskrun = 1U << 13U;  // 6.1

/// The error number of a call of liburing, which returns it negated.
int number_of(int result) {
  return result < 0 ? -result : 0;
}

/// Held where a ring is made or given back: the kernel may map a ring where another thread's was, and no sanitizer sees
/// that its calls order the two.
std::mutex& rings_come_and_go() {
  static std::mutex mutex;
  return mutex;
}

class IoUringEngine final : public IoEngine {
 public:
  IoUringEngine(int depth, bool one_thread) : depth_(depth) {
    const std::lock_guard lock(rings_come_and_go());
    // With SINGLE_ISSUER the kernel refuses every other thread. COOP_TASKRUN alone could leave an end unseen for a tick
    // of the clock when another thread waits for it. SQPOLL would take a core.
    constexpr std::array<unsigned, 3> kOfOneThread{kSingleIssuer | kDeferTaskrun | kCoopTaskrun, kCoopTaskrun, 0};
    constexpr std::array<unsigned, 1> kOfSeveral{0};
    const std::span<const unsigned> tries = one_thread ? std::span<const unsigned>(kOfOneThread) : kOfSeveral;
    int error_number = 0;
    for (const unsigned flags : tries) {
      io_uring_params params{};
      params.flags = flags;
      error_number = ZR_FAILPOINT_ERRNO("io.io_uring.setup")
                         ? errno
                         : number_of(::io_uring_queue_init_params(static_cast<unsigned>(depth), &ring_, &params));
      if (error_number == 0) {
        deferred_ = (flags & kDeferTaskrun) != 0;
        features_ = params.features;
      }
      if (error_number != EINVAL) break;  // EINVAL: flags that this kernel does not know
    }
    ZR_CHECK(
        error_number == 0, ErrorCode::kIo, "io_uring_setup: " + errno_text(error_number),
        {.where = "io.io_uring", .hint = "see /proc/sys/kernel/io_uring_disabled and the filters of the container"});
    if ((features_ & IORING_FEAT_EXT_ARG) != 0) return;
    ::io_uring_queue_exit(&ring_);
    throw Error(ErrorCode::kIo, "io_uring of this kernel cannot wait with a timeout",
                {.where = "io.io_uring", .expected = "Linux 5.11 or newer"});
  }
  ~IoUringEngine() override {
    const std::lock_guard lock(rings_come_and_go());
    ::io_uring_queue_exit(&ring_);
  }

  std::string_view name() const override { return "io_uring"; }
  int depth() const override { return depth_; }

  /// What has a place in the ring counts as taken. If the kernel does not take all of it, the next reap() hands it on,
  /// or says why it cannot.
  std::size_t start(std::span<const Transfer> transfers) override {
    const bool refused = ZR_FAILPOINT_ERRNO("io.io_uring.submit");
    std::size_t taken = 0;
    for (const Transfer& transfer : transfers) {
      io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;
      const auto bytes = static_cast<unsigned>(transfer.bytes);
      if (transfer.op == IoOp::kRead) {
        ::io_uring_prep_read(entry, transfer.descriptor, transfer.data, bytes, transfer.offset);
      } else {
        ::io_uring_prep_write(entry, transfer.descriptor, transfer.data, bytes, transfer.offset);
      }
      entry->user_data = transfer.id;
      ++taken;
    }
    if (!refused) (void)::io_uring_submit(&ring_);
    return taken;
  }

  std::size_t reap(std::span<TransferEnd> ends, Milliseconds wait) override {
    if (::io_uring_sq_ready(&ring_) > 0) check(::io_uring_submit(&ring_), "io_uring_enter");
    if (const std::size_t found = take(ends); found > 0) return found;
    if (wait.count() > 0) {
      __kernel_timespec timeout{.tv_sec = wait.count() / 1'000, .tv_nsec = wait.count() % 1'000 * 1'000'000};
      io_uring_cqe* first = nullptr;
      check(::io_uring_wait_cqes(&ring_, &first, 1, &timeout, nullptr), "io_uring_enter");
    } else if (deferred_) {
      // Ends are put into the ring when this thread asks for them.
      const long done = ::syscall(SYS_io_uring_enter, ring_.ring_fd, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
      check(done < 0 ? -errno : 0, "io_uring_enter");
    } else {
      return 0;
    }
    return take(ends);
  }

 private:
  /// EAGAIN and EBUSY: later. ETIME: nothing has ended in time.
  static void check(int result, const char* call) {
    const int error_number = number_of(result);
    if (error_number == 0 || error_number == EAGAIN || error_number == EBUSY || error_number == EINTR ||
        error_number == ETIME)
      return;
    throw Error(ErrorCode::kIo, std::string(call) + ": " + errno_text(error_number), {.where = "io.io_uring"});
  }

  std::size_t take(std::span<TransferEnd> ends) {
    std::size_t found = 0;
    unsigned head = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      if (found == ends.size()) break;
      ends[found++] = {.id = entry->user_data, .result = entry->res};
    }
    ::io_uring_cq_advance(&ring_, static_cast<unsigned>(found));
    return found;
  }

  const int depth_;
  io_uring ring_{};
  unsigned features_ = 0;
  bool deferred_ = false;
};

}  // namespace

std::unique_ptr<IoEngine> make_io_uring_engine(int depth, bool one_thread) {
  return std::make_unique<IoUringEngine>(depth, one_thread);
}

}  // namespace zeroth::detail
