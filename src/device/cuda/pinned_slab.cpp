#include "device/cuda/pinned_slab.h"

#include "device/cuda/cuda_runtime.h"
#include "device/polling.h"

#include <zeroth/base/error.h>
#include <zeroth/base/interrupt.h>
#include <zeroth/base/text.h>

#include <algorithm>

namespace zeroth::detail {
namespace {

constexpr std::string_view kSlab = "device.cuda.pinned";
constexpr Milliseconds kSlabEndTime{1'000};

}  // namespace

std::shared_ptr<PinnedSlab> PinnedSlab::create(const CudaTable& cuda, int device, std::size_t bytes,
                                               MemoryLedger& ledger, Tag tag) {
  const std::size_t capacity = align_up(std::max<std::size_t>(bytes, 1), kGrainBytes);
  MemoryHold hold = ledger.hold(tag, capacity);
  const CudaDeviceScope scope(cuda, device, kSlab);
  PinResult pinned = pin_memory(cuda, capacity);
  check_cuda(cuda, pinned.status, format_bytes(capacity) + " of pinned memory", kSlab);
  return std::shared_ptr<PinnedSlab>(new PinnedSlab(cuda, std::move(pinned.memory), capacity, std::move(hold)));
}

PinnedSlab::PinnedSlab(const CudaTable& cuda, PinnedMemory memory, std::size_t bytes, MemoryHold hold)
    : cuda_(cuda),
      memory_(std::move(memory)),
      whole_(memory_.get(), bytes),
      hold_(std::move(hold)),
      free_{{0, whole_.size()}} {}

PinnedSlab::~PinnedSlab() {
  bool quiet = false;
  try {
    quiet = poll_for(kSlabEndTime, [&] {
      reclaim();  // nobody else has the slab any more
      return pending_.empty();
    });
  } catch (...) {
    // The device has failed: nothing is copied any more, or nobody knows.
  }
  if (!quiet) (void)memory_.release();
}

PinnedSlab::Block PinnedSlab::take(std::size_t bytes, Milliseconds timeout) {
  if (bytes == 0) return {};
  const std::size_t wanted = align_up(bytes, kGrainBytes);
  ZR_CHECK(
      wanted <= whole_.size(), ErrorCode::kInternal, "more staging is asked for than there is",
      {.where = std::string(kSlab), .expected = "at most " + format_bytes(whole_.size()), .got = format_bytes(bytes)});
  const Deadline deadline(timeout);
  std::span<std::byte> found;
  const auto look = [&] {
    const std::lock_guard lock(mutex_);
    reclaim();
    found = find(wanted);
    ZR_CHECK(!found.empty() || !pending_.empty(), ErrorCode::kOutOfMemory,
             "the staging memory is in use, and none of it is on its way back",
             {.where = std::string(kSlab),
              .expected = format_bytes(wanted) + " in one place",
              .got = "of " + format_bytes(whole_.size())});
    return !found.empty();
  };
  while (!poll_for(deadline.slice(), look)) {
    check_interrupt();
    ZR_CHECK(!deadline.passed(), ErrorCode::kTimeout,
             "no staging memory has come back within " + std::to_string(timeout.count()) + " ms",
             {.where = std::string(kSlab),
              .expected = format_bytes(wanted),
              .hint = "a copy that does not end: the device hangs"});
  }
  return {shared_from_this(), found};
}

std::size_t PinnedSlab::free_bytes() {
  const std::lock_guard lock(mutex_);
  reclaim();
  std::size_t sum = 0;
  for (const auto& [offset, bytes] : free_) sum += bytes;
  return sum;
}

std::size_t PinnedSlab::largest_free() {
  const std::lock_guard lock(mutex_);
  reclaim();
  std::size_t largest = 0;
  for (const auto& [offset, bytes] : free_) largest = std::max(largest, bytes);
  return largest;
}

void PinnedSlab::reclaim() {
  std::erase_if(pending_, [&](const Pending& pending) {
    if (!event_happened(cuda_, pending.event.get(), kSlab)) return false;
    put_back(pending.bytes);
    return true;
  });
}

std::span<std::byte> PinnedSlab::find(std::size_t bytes) {
  for (const auto& [offset, size] : free_) {
    if (size < bytes) continue;
    const std::span<std::byte> found = whole_.subspan(offset, bytes);
    const std::size_t rest = size - bytes;
    const std::size_t after = offset + bytes;
    free_.erase(offset);
    if (rest > 0) free_.emplace(after, rest);
    return found;
  }
  return {};
}

void PinnedSlab::put_back(std::span<std::byte> bytes) {
  auto offset = static_cast<std::size_t>(bytes.data() - whole_.data());
  std::size_t size = bytes.size();
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

PinnedSlab::Block& PinnedSlab::Block::operator=(Block&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  slab_ = std::move(other.slab_);
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

void PinnedSlab::Block::give_back() noexcept {
  if (bytes_.empty()) return;
  {
    const std::lock_guard lock(slab_->mutex_);
    slab_->put_back(bytes_);
  }
  bytes_ = {};
  slab_.reset();
}

void PinnedSlab::Block::give_back_after(std::shared_ptr<void> event) noexcept {
  if (bytes_.empty()) return;
  {
    const std::lock_guard lock(slab_->mutex_);
    slab_->pending_.push_back({bytes_, std::move(event)});
  }
  bytes_ = {};
  slab_.reset();
}

}  // namespace zeroth::detail
