// The stores of states.
#pragma once

#include <zeroth/io/io_queue.h>
#include <zeroth/io/striped_file.h>
#include <zeroth/offload/state_store.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

struct FileStoreOptions {
  std::vector<std::string> folders{};  ///< one a disk; at least one
  std::size_t stripe_bytes = std::size_t{1} << 20U;
  std::size_t first_folder = 0;  ///< see StripeOptions
  FileAccess access = FileAccess::kDirect;
  /// Blocks in memory at once, leased or on their way: 2 or more.
  int slots = 4;
  std::shared_ptr<TransferClock> clock{};  ///< of transfers and waits; null: one of its own
};

/// Bytes of memory that make_file_store() needs: its slots.
[[nodiscard]] std::size_t file_store_memory(std::span<const std::size_t> block_bytes, const FileStoreOptions& options);

/// Bytes on disk that it takes: the blocks, each at a multiple of kIoAlignment, rounded up to whole stripes.
[[nodiscard]] std::uint64_t file_store_bytes(std::span<const std::size_t> block_bytes, const FileStoreOptions& options);

/// Blocks in files. `memory`: file_store_memory() bytes, at a multiple of kIoAlignment; it stays the caller's, and must
/// outlive the store, as the queue must. Throws kUsage, and kIo as StripedFile::create().
[[nodiscard]] std::unique_ptr<StateStore> make_file_store(StateBlocks blocks, const FileStoreOptions& options,
                                                          std::shared_ptr<IoQueue> queue, std::span<std::byte> memory);

/// Blocks in memory. `memory`: their sum, each rounded up to 64 bytes.
[[nodiscard]] std::size_t memory_store_memory(std::span<const std::size_t> block_bytes);
[[nodiscard]] std::unique_ptr<StateStore> make_memory_store(StateBlocks blocks, std::span<std::byte> memory);

/// Blocks of two stores as one: block b is the next block of `second` where in_second[b], else the next of `first`.
/// Throws kUsage if the numbers of blocks do not fit.
[[nodiscard]] std::unique_ptr<StateStore> make_split_store(std::unique_ptr<StateStore> first,
                                                           std::unique_ptr<StateStore> second,
                                                           const std::vector<bool>& in_second);

struct CacheOptions {
  int places = 0;  ///< blocks in the cache at most: 1 or more
  /// Blocks in the order in which each round uses them, for a use that goes in rounds. With it a block whose next use
  /// is furthest gives way, and one that comes later than all of them passes by (Belady). Empty: the one that was used
  /// longest ago gives way. May leave out blocks, which then pass by, and name one several times.
  std::vector<int> order{};
};

/// Bytes of memory that make_cached_store() needs: min(places, blocks) of the largest block, rounded up to 64 bytes.
[[nodiscard]] std::size_t cached_store_memory(std::span<const std::size_t> block_bytes, const CacheOptions& options);

/// Some blocks of `slower` in memory from lease to lease. A block in the cache is read and written there, and goes to
/// `slower` when it gives way, or with flush(); others are leased from `slower`. A block whose place cannot be had,
/// because of leases or because a write fails, stays where it is: nothing is lost. `blocks`: those of `slower`, of
/// which bytes and name are read. `memory`: cached_store_memory() bytes, at a multiple of 64; stays the caller's.
/// Throws kUsage.
[[nodiscard]] std::unique_ptr<StateStore> make_cached_store(std::unique_ptr<StateStore> slower, StateBlocks blocks,
                                                            CacheOptions options, std::span<std::byte> memory);

/// Alignment of slots in memory, and of blocks in files: what every queue and file takes.
inline constexpr std::size_t kIoAlignment = 4096;

}  // namespace zeroth
