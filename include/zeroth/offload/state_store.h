// StateStore: blocks of bytes that rest on a tier, and come to memory on leases.
//
//   memory  a block rests where it is used; a lease costs nothing
//   files   a block rests in files without a name, and visits one of a few slots of memory:
//
//             prefetch(b)      acquire(b)             lease ends           a slot is needed
//             read starts      waits for the read     write starts         the oldest clean block leaves
//
//   split   some blocks here, some there (Twin-Flow's ratio)
//
// A store knows bytes, no elements, plans or ranks. Each block is one transfer and has one checksum, so a caller puts
// together what is used together: master, first and second moment of the same elements.
// Ref: Ren et al., "ZeRO-Offload", ATC 2021; Rajbhandari et al., "ZeRO-Infinity", SC 2021, for states on slower tiers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

enum class Tier : std::uint8_t { kMemory, kFiles };

enum class Access : std::uint8_t {
  kRead,       ///< the block stays as it is
  kUpdate,     ///< the block is read and written
  kOverwrite,  ///< all of the block is written; its bytes are undefined before
};

class StateStore;

/// A block in memory. Move-only. Its end never blocks and never throws: what was written goes to its tier later, and an
/// error of that comes from the next acquire() or flush().
class [[nodiscard]] StateLease {
 public:
  StateLease() = default;
  StateLease(StateStore& store, int block, Access access, std::span<std::byte> bytes)
      : store_(&store), block_(block), access_(access), bytes_(bytes) {}
  StateLease(StateLease&& other) noexcept { *this = std::move(other); }
  StateLease& operator=(StateLease&& other) noexcept {
    if (this != &other) {
      reset();
      store_ = std::exchange(other.store_, nullptr);
      block_ = other.block_;
      access_ = other.access_;
      bytes_ = std::exchange(other.bytes_, {});
    }
    return *this;
  }
  StateLease(const StateLease&) = delete;
  StateLease& operator=(const StateLease&) = delete;
  ~StateLease() { reset(); }

  /// All of the block, at a multiple of 64 bytes. Good until the end of the lease.
  [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
  void reset() noexcept;

 private:
  StateStore* store_ = nullptr;
  int block_ = -1;
  Access access_ = Access::kRead;
  std::span<std::byte> bytes_{};
};

/// The blocks of a store, before it has any.
struct StateBlocks {
  std::vector<std::size_t> bytes{};  ///< one a block, above 0
  /// For errors: "states of blocks.3.mlp [0, 65536)". May be empty.
  std::function<std::string(int block)> name{};
  /// Writes the first value of a block that nobody has written; zeros if it is empty.
  std::function<void(int block, std::span<std::byte>)> initial{};
};

/// What a store has done. Bytes are of whole blocks in files, rounded up to the alignment of files. What moved and what
/// was asked for belong together:
///
///   read_bytes  = needed_bytes  - spared_read_bytes + unused_bytes + what is read and nobody has leased yet
///   write_bytes = changed_bytes - spared_write_bytes + writes that failed and were made again
struct StoreCounters {
  std::uint64_t leases = 0;
  std::uint64_t reads = 0;   ///< blocks that came from the slower tier
  std::uint64_t writes = 0;  ///< blocks that went there
  std::uint64_t read_bytes = 0;
  std::uint64_t write_bytes = 0;
  std::uint64_t prefetched = 0;          ///< leases whose read had begun before, and had ended
  std::uint64_t late = 0;                ///< leases whose read had begun before, and had not ended: they waited for it
  std::uint64_t on_demand = 0;           ///< leases that waited for a read that nobody had begun
  std::uint64_t wait_ns = 0;             ///< how long leases and flushes waited for transfers
  std::uint64_t slot_hits = 0;           ///< leases of a block that a slot still had
  std::uint64_t needed_bytes = 0;        ///< of leases that need what an earlier one wrote
  std::uint64_t spared_read_bytes = 0;   ///< of these, what was still in memory
  std::uint64_t changed_bytes = 0;       ///< of leases that write
  std::uint64_t spared_write_bytes = 0;  ///< of these, what stays in a cache
  std::uint64_t unused_bytes = 0;        ///< read, and gone from memory before a lease
  std::uint64_t ahead_bytes = 0;         ///< read or on their way, and not leased yet; a level, no sum

  StoreCounters& operator+=(const StoreCounters& other);
  /// What happened since `before`; the level is that of now.
  [[nodiscard]] StoreCounters since(const StoreCounters& before) const;
  bool operator==(const StoreCounters&) const = default;
};

/// One thread at a time. Leases must end before their store.
class StateStore {
 public:
  StateStore() = default;
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;
  virtual ~StateStore() = default;

  [[nodiscard]] virtual int num_blocks() const = 0;

  /// Starts to bring a block, if a slot is free for it. Never blocks. True: it is in memory or on its way. Throws as
  /// acquire().
  virtual bool prefetch(int block) = 0;
  /// Blocks until the block is in memory. A block has one lease at a time, unless all are for reading.
  /// Throws kUsage for a block out of range, one that is leased in another way, or if every slot has a lease; kIo for
  /// transfers that failed, now or behind an earlier lease, and for bytes that are not those that were written (block,
  /// generation, length and checksum are compared); kTimeout.
  [[nodiscard]] virtual StateLease acquire(int block, Access access) = 0;
  /// Blocks until all that was written is on its tier. Throws as acquire(). Blocks whose write failed stay in their
  /// slots: flush() writes them again.
  virtual void flush() = 0;

  /// Bytes at rest on a tier: whole blocks, in files rounded up to their alignment.
  [[nodiscard]] virtual std::uint64_t resting_bytes(Tier tier) const = 0;
  /// What the file systems say that the files take on disk (st_blocks).
  [[nodiscard]] virtual std::uint64_t measured_file_bytes() const { return 0; }
  /// How the files are used, for a log: "direct", or "buffered (why)"; "" without files.
  [[nodiscard]] virtual std::string file_access() const { return ""; }
  /// Memory for blocks on their way.
  [[nodiscard]] virtual std::uint64_t slot_bytes() const = 0;
  [[nodiscard]] virtual StoreCounters counters() const = 0;

 private:
  friend class StateLease;
  virtual void give_back(int block, Access access) noexcept = 0;
};

inline void StateLease::reset() noexcept {
  if (store_ != nullptr) std::exchange(store_, nullptr)->give_back(block_, access_);
}

}  // namespace zeroth
