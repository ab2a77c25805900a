// Linux's older asynchronous interface by its system calls: io_setup(2), io_submit(2), io_getevents(2), io_destroy(2).
#include "io/engine.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <vector>

namespace zeroth::detail {
namespace {

class AioEngine final : public IoEngine {
 public:
  explicit AioEngine(int depth)
      : depth_(depth),
        blocks_(static_cast<std::size_t>(depth)),
        pointers_(static_cast<std::size_t>(depth)),
        events_(static_cast<std::size_t>(depth)) {
    const long done = ZR_FAILPOINT_ERRNO("io.aio.setup") ? -1 : ::syscall(SYS_io_setup, depth, &context_);
    ZR_CHECK(done == 0, ErrorCode::kIo, "io_setup: " + errno_text(errno),
             {.where = "io.aio",
              .which = "depth " + std::to_string(depth),
              .hint = "/proc/sys/fs/aio-nr of /proc/sys/fs/aio-max-nr are in use on this machine"});
  }
  ~AioEngine() override { (void)::syscall(SYS_io_destroy, context_); }

  std::string_view name() const override { return "aio"; }
  int depth() const override { return depth_; }

  /// The kernel copies the blocks before it returns.
  std::size_t start(std::span<const Transfer> transfers) override {
    const std::size_t count = std::min(transfers.size(), blocks_.size());
    for (std::size_t i = 0; i < count; ++i) {
      const Transfer& transfer = transfers[i];
      blocks_[i] = iocb{};
      blocks_[i].aio_data = transfer.id;
      blocks_[i].aio_lio_opcode = transfer.op == IoOp::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      blocks_[i].aio_fildes = static_cast<std::uint32_t>(transfer.descriptor);
      blocks_[i].aio_buf = reinterpret_cast<std::uintptr_t>(transfer.data);
      blocks_[i].aio_nbytes = transfer.bytes;
      blocks_[i].aio_offset = static_cast<std::int64_t>(transfer.offset);
      pointers_[i] = &blocks_[i];
    }
    const long taken = ZR_FAILPOINT_ERRNO("io.aio.submit")
                           ? -1
                           : ::syscall(SYS_io_submit, context_, static_cast<long>(count), pointers_.data());
    if (taken < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    ZR_CHECK(taken >= 0, ErrorCode::kIo, "io_submit: " + errno_text(errno), {.where = "io.aio"});
    return static_cast<std::size_t>(taken);
  }

  std::size_t reap(std::span<TransferEnd> ends, Milliseconds wait) override {
    timespec timeout{.tv_sec = wait.count() / 1'000, .tv_nsec = wait.count() % 1'000 * 1'000'000};
    const auto wanted = static_cast<long>(std::min(ends.size(), events_.size()));
    const long found =
        ZR_FAILPOINT_ERRNO("io.aio.events")
            ? -1
            : ::syscall(SYS_io_getevents, context_, wait.count() > 0 ? 1L : 0L, wanted, events_.data(), &timeout);
    if (found < 0 && errno == EINTR) return 0;
    ZR_CHECK(found >= 0, ErrorCode::kIo, "io_getevents: " + errno_text(errno), {.where = "io.aio"});
    for (std::size_t i = 0; i < static_cast<std::size_t>(found); ++i) {
      const io_event& event = events_[i];
      // res2 is a second result of drivers, of 0 for files.
      ends[i] = {.id = event.data, .result = event.res >= 0 && event.res2 != 0 ? -EIO : event.res};
    }
    return static_cast<std::size_t>(found);
  }

 private:
  const int depth_;
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;
  std::vector<iocb*> pointers_;
  std::vector<io_event> events_;
};

}  // namespace

std::unique_ptr<IoEngine> make_aio_engine(int depth) {
  return std::make_unique<AioEngine>(depth);
}

}  // namespace zeroth::detail
