// ActivationStore: blocks in files that are written once, read in about the reverse order, and dropped.
//
//   forward    put(a) put(b) put(c)      copied to slots of memory, and written behind the caller
//   backward   get(c) get(b) get(a)      each reads the live blocks before it ahead
//   anywhere   drop(x)                   its place in the files is free for the next block
//
// A block has any length. It passes memory in pieces of one size, so the memory is that of the slots, whatever the
// number and size of blocks; the files grow to the highest sum of live blocks, and their place is used again.
// Ref: Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1.2 (offload of activations); Liao et al., "Fuyou",
// 2024, section 3.3.
#pragma once

#include <zeroth/io/io_queue.h>
#include <zeroth/io/scratch_file.h>
#include <zeroth/offload/state_store.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

struct ActivationStoreOptions {
  std::vector<std::string> folders{};  ///< one a disk, at least one; the files take turns
  FileAccess access = FileAccess::kDirect;
  std::size_t piece_bytes = std::size_t{1} << 20U;     ///< of one transfer and one slot; a multiple of 4096
  int slots = 32;                                      ///< pieces in memory at once; 2 or more
  std::size_t segment_bytes = std::size_t{64} << 20U;  ///< by which the files grow, at least
  /// Blocks that are read ahead of the one that is asked for, and more while they fill less than a quarter of the
  /// slots; 0: none.
  int prefetch = 2;
  IoQueueOptions io{};
};

/// What a store has done, and what it has.
struct ActivationCounters {
  std::uint64_t puts = 0;
  std::uint64_t put_bytes = 0;  ///< of the caller
  std::uint64_t gets = 0;
  std::uint64_t get_bytes = 0;
  std::uint64_t on_demand = 0;    ///< gets of a block of which a part was neither in memory nor on its way
  std::uint64_t write_bytes = 0;  ///< to files, rounded up to their alignment
  std::uint64_t read_bytes = 0;   ///< from files, likewise
  std::uint64_t wait_ns = 0;      ///< that callers waited for transfers
  std::uint64_t live_blocks = 0;
  std::uint64_t live_bytes = 0;       ///< of the caller
  std::uint64_t peak_live_bytes = 0;  ///< the highest since reset_counters()
  bool operator==(const ActivationCounters&) const = default;
};

/// Thread safe: one caller at a time passes, the others wait. Only drop() never waits.
class ActivationStore {
 public:
  using Id = std::uint64_t;

  /// Opens a queue, and maps the memory of the slots: memory_bytes(). Files come with the first block.
  /// Throws kUsage for options out of range, else as open_io_queue().
  [[nodiscard]] static std::shared_ptr<ActivationStore> open(const ActivationStoreOptions& options);
  /// ActivationStoreOptions::slots for so many bytes of memory: 2 or more.
  [[nodiscard]] static int slots_in(std::size_t buffer_bytes, std::size_t piece_bytes);
  /// Bytes of memory that open() takes.
  [[nodiscard]] static std::size_t memory_bytes(const ActivationStoreOptions& options);

  ActivationStore() = default;
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  virtual ~ActivationStore() = default;

  /// Copies `bytes`, at least one, and starts to write them. Blocks while all slots are on their way to files. Ids
  /// ascend. `name`: for errors. Throws kIo if a transfer failed, of this block or of one before it, or if a folder has
  /// no room; kTimeout. Then there is no new block.
  [[nodiscard]] virtual Id put(std::span<const std::byte> bytes, std::string name) = 0;
  /// Copies a block to `out`, which has its length, and starts to read the live blocks before it. Blocks until the
  /// bytes are there. A block may be read again until it is dropped. Throws kUsage for a block that is not there; kIo
  /// for transfers that failed, and for bytes that are not those that were written (length and checksum are compared);
  /// kTimeout.
  virtual void get(Id block, std::span<std::byte> out) = 0;
  /// Forgets a block. Never blocks, never throws; its place is free when its transfers have ended.
  virtual void drop(Id block) noexcept = 0;

  [[nodiscard]] virtual ActivationCounters counters() = 0;
  /// Of its transfers, since it was opened: reset_counters() does not change them. Leases are gets, reads are the
  /// blocks of gets, and writes those of puts.
  [[nodiscard]] virtual StoreCounters transfers() = 0;
  [[nodiscard]] virtual TransferTimes times() = 0;
  /// See TransferClock.
  virtual void keep_spans(std::size_t most) = 0;
  [[nodiscard]] virtual std::vector<TransferSpan> spans() = 0;
  /// The counters begin at 0, the peak at what is live.
  virtual void reset_counters() = 0;
  /// Bytes of the files, used or not.
  [[nodiscard]] virtual std::uint64_t file_bytes() = 0;
  /// What the file systems say that the files take on disk (st_blocks).
  [[nodiscard]] virtual std::uint64_t measured_file_bytes() = 0;
};

}  // namespace zeroth
