// Requests to files, and the queue that carries them out beside the computation.
//
// All engines stand behind IoQueue:
//   io_uring  the kernel's rings; needs liburing when Zeroth is built
//   aio       the kernel's older interface; asynchronous only for direct files, else it blocks in submit()
//   threads   pread and pwrite on a few threads; works everywhere
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/base/log.h>
#include <zeroth/device/stream.h>
#include <zeroth/io/scratch_file.h>
#include <zeroth/io/transfer_clock.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace zeroth {

class IoFaults;

enum class IoOp : std::uint8_t { kRead, kWrite };
[[nodiscard]] std::string_view name_of(IoOp op) noexcept;

/// One transfer between memory and a file. Offset, length and address are multiples of file->alignment().
struct IoRequest {
  IoOp op = IoOp::kRead;
  std::shared_ptr<const ScratchFile> file{};
  std::uint64_t offset = 0;                ///< in the file, in bytes
  std::span<std::byte> memory{};           ///< a read fills it, a write only reads it; stays the caller's
  std::string name{};                      ///< whose bytes they are, for errors: "moments of layers.3.weight"
  std::shared_ptr<TransferClock> clock{};  ///< is told when it begins and ends; null: nobody is
};

/// What a queue has done so far.
struct IoCounters {
  std::uint64_t requests = 0;       ///< finished, well or not
  std::uint64_t bytes_read = 0;     ///< by the kernel's count, also those of requests that failed later
  std::uint64_t bytes_written = 0;  ///< likewise
  std::uint64_t resubmissions = 0;  ///< rests of short transfers, and transfers that the kernel put off
  std::uint64_t failures = 0;       ///< requests that ended with an error
  std::size_t peak_in_flight = 0;   ///< transfers that an engine had at once
  bool operator==(const IoCounters&) const = default;
};

/// Carries out requests. Used by one thread at a time (IoQueueOptions::one_thread: by one thread). Nothing happens
/// between its calls but in the kernel or on the engine's threads: what waits for a free place in the engine starts in
/// submit(), progress() and waits.
class IoQueue {
 public:
  IoQueue() = default;
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  /// Requests that have not started are dropped; who waits for them gets kAborted. Blocks until the others are done,
  /// because the kernel writes to the memory of reads; after the timeout it logs which ones it waits for. In a forked
  /// child it leaves all to the parent.
  virtual ~IoQueue() = default;

  /// Starts what fits and keeps the rest for later. Requests run in any order, those of different calls too: a read of
  /// what a write has not yet written must wait for it. The memory of a request must stay until the Work is done, or
  /// the queue is gone. Does not block (aio on buffered files: for the transfer). Memory on huge pages
  /// (ArenaKind::kPrivate) makes direct transfers faster: docs/io.md.
  /// The Work is done when all of its requests are. Its wait() drives the queue and throws: kIo with file, offset,
  /// length, name and reason, the first failure of its requests, after all of them have ended; kTimeout after the
  /// timeout of the queue: the requests go on, and it may be waited for again. Its order_before() waits on the
  /// host, because no device looks into the queue; after a timeout there the stream has the error, and the transfer may
  /// still move bytes.
  /// Throws kUsage, before anything starts: a request without file or memory, outside of the file or not aligned; a
  /// call in a forked child or on another thread than the queue's.
  [[nodiscard]] virtual Work submit(std::span<const IoRequest> requests) = 0;
  /// Takes what is done and starts what waits, without blocking. For callers that compute for long between waits.
  virtual void progress() = 0;

  /// Transfers that the engine has at once at most.
  [[nodiscard]] virtual int depth() const = 0;
  /// Requests that are not finished.
  [[nodiscard]] virtual std::size_t pending() const = 0;
  [[nodiscard]] virtual IoCounters counters() const = 0;
  /// "io_uring", "aio" or "threads".
  [[nodiscard]] virtual std::string_view name() const = 0;
  /// Which engines were not taken, and why: "io_uring: refused (Operation not permitted); ..."; "" for the first one.
  [[nodiscard]] virtual const std::string& reason() const = 0;
};

enum class IoEngineKind { kAuto, kIoUring, kAio, kThreads };
/// "auto", "io_uring", "aio", "threads"
[[nodiscard]] std::string_view name_of(IoEngineKind kind) noexcept;
[[nodiscard]] std::optional<IoEngineKind> io_engine_of(std::string_view name) noexcept;

struct IoQueueOptions {
  /// kAuto takes the first of io_uring, aio, threads that passes the probe, aio only where files are direct. A named
  /// one that does not pass is an error.
  IoEngineKind engine = IoEngineKind::kAuto;
  int depth = 32;       ///< 1 to 4096
  int num_threads = 4;  ///< of the engine `threads`, 1 to 64; more than `depth` are not started
  /// The thread that opens the queue is the only one that uses it. io_uring then leaves out locks and interrupts
  /// (SINGLE_ISSUER, DEFER_TASKRUN).
  bool one_thread = false;
  Milliseconds timeout{60'000};  ///< of each wait
  /// Called about every 100 ms of a wait, and may throw to end it: a rank looks after the others. The requests go on.
  std::function<void()> watch{};
  Logger log{};                        ///< of the destructor
  std::shared_ptr<IoFaults> faults{};  ///< tests only: faults between the queue and its engine
};

/// Opens a queue. Probes an engine by a file in `folder`: writes 8 blocks, reads them back and compares,
/// within 10 s a direction, whatever IoQueueOptions::timeout is.
/// Throws kUsage for options out of range; kIo if the named engine, or all, fail the probe, with the reason of each.
[[nodiscard]] std::unique_ptr<IoQueue> open_io_queue(const std::string& folder, const IoQueueOptions& options = {});

}  // namespace zeroth
