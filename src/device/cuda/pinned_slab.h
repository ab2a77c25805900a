// Pinned memory of the host, through which copies to and from a device run beside everything else. Pinning costs a call
// of the driver that stops the device, so it is done once.
#pragma once

#include "device/cuda/cuda_table.h"

#include <zeroth/base/deadline.h>
#include <zeroth/device/memory.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::detail {

/// One allocation, handed out in blocks at multiples of 256 bytes: the lowest place that is large enough, so that the
/// same steps get the same places. Thread safe.
class PinnedSlab : public std::enable_shared_from_this<PinnedSlab> {
 public:
  static constexpr std::size_t kGrainBytes = 256;

  /// A part of the slab. Move-only; owns the slab as well.
  class [[nodiscard]] Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept : slab_(std::move(other.slab_)), bytes_(std::exchange(other.bytes_, {})) {}
    Block& operator=(Block&& other) noexcept;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    /// Gives it back at once: no copy may be under way.
    ~Block() { give_back(); }

    [[nodiscard]] std::byte* data() const { return bytes_.data(); }
    [[nodiscard]] std::span<std::byte> bytes() const { return bytes_; }
    void give_back() noexcept;
    /// Gives it back once the device has come to `event` (of an EventCache), which the copies come before. Does not
    /// block.
    void give_back_after(std::shared_ptr<void> event) noexcept;

   private:
    friend class PinnedSlab;
    Block(std::shared_ptr<PinnedSlab> slab, std::span<std::byte> bytes) : slab_(std::move(slab)), bytes_(bytes) {}
    std::shared_ptr<PinnedSlab> slab_;
    std::span<std::byte> bytes_{};
  };

  /// `bytes` are counted as `tag` from now on. Throws kOutOfMemory.
  [[nodiscard]] static std::shared_ptr<PinnedSlab> create(const CudaTable& cuda, int device, std::size_t bytes,
                                                          MemoryLedger& ledger,
                                                          Tag tag = {.state = MemoryState::kControl});
  PinnedSlab(const PinnedSlab&) = delete;
  PinnedSlab& operator=(const PinnedSlab&) = delete;
  /// Waits for copies that are under way, at most a second; memory that they may still touch then is not given back.
  ~PinnedSlab();

  /// Waits for blocks that come back after an event, at most `timeout` (kTimeout); not for those that somebody holds:
  /// where nothing is on its way back, kOutOfMemory at once. Throws kInternal for more than the whole slab. 0 bytes are
  /// an empty block.
  [[nodiscard]] Block take(std::size_t bytes, Milliseconds timeout);

  [[nodiscard]] std::size_t capacity() const { return whole_.size(); }
  /// Bytes that could be taken now, in all places, and in the largest one.
  [[nodiscard]] std::size_t free_bytes();
  [[nodiscard]] std::size_t largest_free();

 private:
  struct Pending {
    std::span<std::byte> bytes;
    std::shared_ptr<void> event;
  };

  PinnedSlab(const CudaTable& cuda, PinnedMemory memory, std::size_t bytes, MemoryHold hold);
  /// Under mutex_: what has come back.
  void reclaim();
  void put_back(std::span<std::byte> bytes);
  [[nodiscard]] std::span<std::byte> find(std::size_t bytes);

  const CudaTable& cuda_;
  PinnedMemory memory_;
  const std::span<std::byte> whole_;
  MemoryHold hold_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  ///< bytes by offset; no two touch
  std::vector<Pending> pending_;
};

}  // namespace zeroth::detail
