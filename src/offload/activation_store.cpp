#include "offload/checks.h"
#include "offload/file_space.h"
#include "offload/transfers.h"

#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/offload/activation_store.h>
#include <zeroth/offload/stores.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kActivations = "offload.activations";

enum class PieceState : std::uint8_t {
  kFree,
  kReading,
  kClean,  ///< as in the files
  kDirty,  ///< newer than the files: its write failed
  kWriting,
};

struct PieceSlot {
  std::span<std::byte> memory{};
  PieceState state = PieceState::kFree;
  ActivationStore::Id block = 0;
  std::size_t piece = 0;
  std::uint64_t used = 0;  ///< by age: when a copy or a transfer began; 0: its block has been read, it may go first
  Work transfer{};
};

struct SavedBlock {
  std::string name{};
  std::size_t bytes = 0;
  offload::Extent place{};
  std::vector<int> slots{};  ///< of each piece; -1: in the files only
  std::vector<std::uint64_t> checksums{};
  int in_flight = 0;  ///< transfers that the kernel may still make
  bool dropped = false;
};

void require_usable(const ActivationStoreOptions& options) {
  ZR_CHECK(!options.folders.empty(), ErrorCode::kUsage, "activations that rest in files have no folder",
           {.where = kActivations, .expected = "a folder on a local disk, or several"});
  ZR_CHECK(options.slots >= 2 && options.prefetch >= 0, ErrorCode::kUsage,
           "a store of activations has too few slots, or reads a negative number of blocks ahead",
           {.where = kActivations,
            .expected = "2 slots or more, 0 blocks or more",
            .got = std::to_string(options.slots) + " slots, " + std::to_string(options.prefetch) + " blocks"});
  ZR_CHECK(
      options.piece_bytes > 0 && options.piece_bytes % kIoAlignment == 0 && options.segment_bytes % kIoAlignment == 0,
      ErrorCode::kUsage, "pieces of activations do not fit the alignment of files",
      {.where = kActivations,
       .expected = "multiples of " + std::to_string(kIoAlignment),
       .got = std::to_string(options.piece_bytes) + " and " + std::to_string(options.segment_bytes)});
}

class FileActivations final : public ActivationStore {
 public:
  explicit FileActivations(const ActivationStoreOptions& options)
      : piece_bytes_(options.piece_bytes),
        prefetch_(options.prefetch),
        arena_(Arena::create(ArenaKind::kPrivate, memory_bytes(options), "activations")),
        queue_(open_io_queue(options.folders.front(), options.io)),
        transfers_(std::make_shared<TransferClock>()),
        space_(options.folders, {.access = options.access}, options.segment_bytes),
        slots_(static_cast<std::size_t>(options.slots)) {
    const std::span<std::byte> memory = arena_.reserve(slots_.size() * piece_bytes_, kIoAlignment);
    for (std::size_t number = 0; number < slots_.size(); ++number)
      slots_[number].memory = memory.subspan(number * piece_bytes_, piece_bytes_);
  }

  ~FileActivations() override {
    for (const PieceSlot& slot : slots_) {
      if (slot.state == PieceState::kReading || slot.state == PieceState::kWriting) offload::wait_at_end(slot.transfer);
    }
  }

  [[nodiscard]] Id put(std::span<const std::byte> bytes, std::string name) override {
    ZR_CHECK(!bytes.empty(), ErrorCode::kUsage, "a block of activations is empty",
             {.where = kActivations, .which = name});
    const std::scoped_lock lock(mutex_);
    forget_dropped();
    const Id id = ++last_id_;
    const std::size_t count = (bytes.size() + piece_bytes_ - 1) / piece_bytes_;
    SavedBlock& block = blocks_[id];
    block.name = std::move(name);
    block.bytes = bytes.size();
    block.slots.assign(count, -1);
    block.checksums.assign(count, 0);
    count_live(1, bytes.size());
    try {
      block.place = space_.take(align_up(bytes.size(), kIoAlignment));
      for (std::size_t piece = 0; piece < count; ++piece) {
        const std::span<const std::byte> part =
            bytes.subspan(piece * piece_bytes_, std::min(piece_bytes_, bytes.size() - piece * piece_bytes_));
        PieceSlot& slot = fill(make_room(), id, piece);
        std::memcpy(slot.memory.data(), part.data(), part.size());
        block.checksums[piece] = checksum(id, block, piece);
        slot.state = PieceState::kDirty;
        start(slot, IoOp::kWrite);
      }
    } catch (...) {
      forget(id);
      throw;
    }
    ++counters_.puts;
    counters_.put_bytes += bytes.size();
    return id;
  }

  void get(Id id, std::span<std::byte> out) override {
    const std::scoped_lock lock(mutex_);
    forget_dropped();
    const auto found = blocks_.find(id);
    ZR_CHECK(found != blocks_.end() && !found->second.dropped, ErrorCode::kUsage, "a block of activations is not there",
             {.where = kActivations, .which = "block " + std::to_string(id)});
    SavedBlock& block = found->second;
    ZR_CHECK(out.size() == block.bytes, ErrorCode::kUsage, "a block of activations has another length",
             {.where = kActivations,
              .which = block.name,
              .expected = std::to_string(block.bytes),
              .got = std::to_string(out.size())});
    ++counters_.gets;
    counters_.get_bytes += block.bytes;
    if (std::ranges::count(block.slots, -1) > 0) ++counters_.on_demand;
    (void)bring(id, block, ++clock_);
    for (std::size_t piece = 0; piece < block.slots.size(); ++piece) {
      if (block.slots[piece] < 0) read(make_room(), id, piece);
      PieceSlot& slot = slots_[index(block.slots[piece])];
      if (slot.state == PieceState::kReading) finish_read(slot);
      std::memcpy(out.data() + piece * piece_bytes_, slot.memory.data(), length(block, piece));
      slot.used = 0;
    }
    read_ahead(found);
  }

  void drop(Id block) noexcept override {
    const std::scoped_lock lock(dropped_mutex_);
    dropped_.push_back(block);
  }

  [[nodiscard]] ActivationCounters counters() override {
    const std::scoped_lock lock(mutex_);
    forget_dropped();
    return counters_;
  }
  [[nodiscard]] StoreCounters transfers() override {
    const std::scoped_lock lock(mutex_);
    StoreCounters sum = transfers_before_;
    sum += transfers_now();
    return sum;
  }
  [[nodiscard]] TransferTimes times() override {
    const std::scoped_lock lock(mutex_);
    return transfers_->times();
  }
  void keep_spans(std::size_t most) override {
    const std::scoped_lock lock(mutex_);
    transfers_->keep_spans(most);
  }
  [[nodiscard]] std::vector<TransferSpan> spans() override {
    const std::scoped_lock lock(mutex_);
    return transfers_->spans();
  }
  void reset_counters() override {
    const std::scoped_lock lock(mutex_);
    forget_dropped();
    transfers_before_ += transfers_now();
    counters_ = {.live_blocks = counters_.live_blocks,
                 .live_bytes = counters_.live_bytes,
                 .peak_live_bytes = counters_.live_bytes};
  }
  [[nodiscard]] std::uint64_t file_bytes() override {
    const std::scoped_lock lock(mutex_);
    return space_.bytes();
  }
  [[nodiscard]] std::uint64_t measured_file_bytes() override {
    const std::scoped_lock lock(mutex_);
    std::uint64_t total = 0;
    for (std::size_t number = 0; number < space_.num_files(); ++number)
      total += offload::bytes_on_disk(*space_.file(number), kActivations);
    return total;
  }

 private:
  using Blocks = std::map<Id, SavedBlock>;

  [[nodiscard]] StoreCounters transfers_now() const {
    return {.leases = counters_.gets,
            .reads = counters_.gets,
            .writes = counters_.puts,
            .read_bytes = counters_.read_bytes,
            .write_bytes = counters_.write_bytes,
            .on_demand = counters_.on_demand,
            .wait_ns = counters_.wait_ns};
  }
  [[nodiscard]] static std::size_t index(int value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] std::size_t length(const SavedBlock& block, std::size_t piece) const {
    return std::min(piece_bytes_, block.bytes - piece * piece_bytes_);
  }
  [[nodiscard]] std::uint64_t checksum(Id id, const SavedBlock& block, std::size_t piece) const {
    return offload::checksum_of(slots_[index(block.slots[piece])].memory.first(length(block, piece)),
                                static_cast<int>(piece), id);
  }
  void count_live(int blocks, std::size_t bytes) {
    counters_.live_blocks += static_cast<std::uint64_t>(blocks);  // modulo 2^64, as the bytes
    counters_.live_bytes += blocks > 0 ? bytes : std::uint64_t{0} - bytes;
    counters_.peak_live_bytes = std::max(counters_.peak_live_bytes, counters_.live_bytes);
  }

  // --- blocks that go ---

  void forget_dropped() {
    std::vector<Id> dropped;
    {
      const std::scoped_lock lock(dropped_mutex_);
      dropped.swap(dropped_);
    }
    for (const Id id : dropped) forget(id);
  }
  void forget(Id id) {
    const auto found = blocks_.find(id);
    if (found == blocks_.end() || found->second.dropped) return;
    SavedBlock& block = found->second;
    block.dropped = true;
    count_live(-1, block.bytes);
    for (int& number : block.slots) {
      if (number < 0) continue;
      PieceSlot& slot = slots_[index(number)];
      if (slot.state != PieceState::kReading && slot.state != PieceState::kWriting) free_slot(slot);
    }
    erase_if_over(found);
  }
  /// A place that the kernel may still write to is not given to another block.
  void erase_if_over(Blocks::iterator found) {
    if (!found->second.dropped || found->second.in_flight > 0) return;
    if (found->second.place.bytes > 0) space_.give_back(found->second.place);
    blocks_.erase(found);
  }

  // --- slots ---

  PieceSlot& fill(int number, Id id, std::size_t piece) {
    PieceSlot& slot = slots_[index(number)];
    slot.block = id;
    slot.piece = piece;
    slot.used = ++clock_;
    blocks_.at(id).slots[piece] = number;
    return slot;
  }
  void free_slot(PieceSlot& slot) {
    blocks_.at(slot.block).slots[slot.piece] = -1;
    slot.block = 0;
    slot.state = PieceState::kFree;
    slot.transfer = {};
  }
  void start(PieceSlot& slot, IoOp op) {
    SavedBlock& block = blocks_.at(slot.block);
    const std::span<std::byte> memory = slot.memory.first(align_up(length(block, slot.piece), kIoAlignment));
    const IoRequest request{.op = op,
                            .file = space_.file(block.place.file),
                            .offset = block.place.offset + slot.piece * piece_bytes_,
                            .memory = memory,
                            .name = block.name,
                            .clock = transfers_};
    slot.transfer = queue_->submit({&request, 1});
    slot.state = op == IoOp::kRead ? PieceState::kReading : PieceState::kWriting;
    ++block.in_flight;
    (op == IoOp::kRead ? counters_.read_bytes : counters_.write_bytes) += memory.size();
  }
  void read(int number, Id id, std::size_t piece) {
    PieceSlot& slot = fill(number, id, piece);
    try {
      start(slot, IoOp::kRead);
    } catch (...) {
      free_slot(slot);
      throw;
    }
  }

  /// Waits for a slot's transfer. A failed write leaves the slot dirty, a failed read free. Errors of blocks that were
  /// dropped are nobody's.
  void finish(PieceSlot& slot) {
    const auto found = blocks_.find(slot.block);
    const PieceState was = slot.state;
    const auto settle = [&](PieceState state) {
      slot.transfer = {};
      slot.state = state;
      --found->second.in_flight;
      if (state == PieceState::kFree || found->second.dropped) free_slot(slot);
      erase_if_over(found);
    };
    const bool dropped = found->second.dropped;
    try {
      offload::wait_for(slot.transfer, counters_.wait_ns, *transfers_, found->second.name);
    } catch (...) {
      if (!offload::has_ended(slot.transfer)) throw;
      settle(was == PieceState::kWriting ? PieceState::kDirty : PieceState::kFree);
      if (dropped) return;
      throw;
    }
    settle(PieceState::kClean);
  }

  void finish_read(PieceSlot& slot) {
    const Id id = slot.block;
    const std::size_t piece = slot.piece;
    finish(slot);
    if (slot.block != id) return;  // it was dropped
    const SavedBlock& block = blocks_.at(id);
    const std::uint64_t got = checksum(id, block, piece);
    if (got == block.checksums[piece]) return;
    const std::shared_ptr<const ScratchFile>& file = space_.file(block.place.file);
    Error error(
        ErrorCode::kIo, "an activation that was read is not the one that was written",
        {.where = kActivations,
         .which = block.name + ", byte " + std::to_string(piece * piece_bytes_) + " of it, at byte " +
                  std::to_string(block.place.offset + piece * piece_bytes_) + " of a file in " + file->folder(),
         .expected = offload::hex(block.checksums[piece]) + " (" + std::to_string(length(block, piece)) + " bytes)",
         .got = offload::hex(got),
         .hint = "the disk or what is between it and memory changed bytes: look at its health, and go on from "
                 "a checkpoint"});
    free_slot(slot);
    throw error;
  }

  /// A slot that can be had without waiting and was not used after `limit`, or -1.
  [[nodiscard]] int find_slot(std::uint64_t limit) {
    queue_->progress();
    int oldest = -1;
    for (int number = 0; number < static_cast<int>(slots_.size()); ++number) {
      PieceSlot& slot = slots_[index(number)];
      const bool flies = slot.state == PieceState::kWriting || slot.state == PieceState::kReading;
      const bool unwanted = slot.state == PieceState::kWriting || (flies && blocks_.at(slot.block).dropped);
      if (unwanted && slot.transfer.event().ready()) finish(slot);
      if (slot.state == PieceState::kFree) return number;
      if (slot.state != PieceState::kClean || slot.used > limit) continue;
      if (oldest < 0 || slot.used < slots_[index(oldest)].used) oldest = number;
    }
    if (oldest >= 0) free_slot(slots_[index(oldest)]);
    return oldest;
  }

  [[nodiscard]] int make_room() {
    if (const int number = find_slot(clock_); number >= 0) return number;
    // The oldest write; else a write that failed, once more; else the oldest read.
    for (const PieceState state : {PieceState::kWriting, PieceState::kDirty, PieceState::kReading}) {
      PieceSlot* oldest = nullptr;
      for (PieceSlot& slot : slots_) {
        if (slot.state == state && (oldest == nullptr || slot.used < oldest->used)) oldest = &slot;
      }
      if (oldest == nullptr) continue;
      if (state == PieceState::kDirty) start(*oldest, IoOp::kWrite);
      if (state == PieceState::kReading) {
        finish_read(*oldest);
      } else {
        finish(*oldest);
      }
      if (oldest->state != PieceState::kFree) free_slot(*oldest);
      return static_cast<int>(oldest - slots_.data());
    }
    throw Error(ErrorCode::kInternal, "no slot of a store of activations can be had", {.where = kActivations});
  }

  // --- reading ahead ---

  /// Starts to read what is in files only, as far as slots can be had without waiting. False: there were not enough.
  bool bring(Id id, SavedBlock& block, std::uint64_t limit) {
    for (std::size_t piece = 0; piece < block.slots.size(); ++piece) {
      if (block.slots[piece] >= 0) {
        slots_[index(block.slots[piece])].used = ++clock_;
        continue;
      }
      const int number = find_slot(limit);
      if (number < 0) return false;
      read(number, id, piece);
    }
    return true;
  }
  void read_ahead(Blocks::iterator from) {
    if (prefetch_ == 0) return;
    const std::uint64_t limit = clock_;
    int blocks = prefetch_;
    std::size_t pieces = slots_.size() / 4;  // of small blocks: one operation needs several at once
    while ((blocks > 0 || pieces > 0) && from != blocks_.begin()) {
      --from;
      if (from->second.dropped) continue;
      blocks = std::max(0, blocks - 1);
      pieces -= std::min(pieces, from->second.slots.size());
      if (!bring(from->first, from->second, limit)) return;
    }
  }

  std::size_t piece_bytes_;
  int prefetch_;
  Arena arena_;
  std::unique_ptr<IoQueue> queue_;
  std::shared_ptr<TransferClock> transfers_;
  std::mutex mutex_;  // of all below but the last two
  offload::FileSpace space_;
  std::vector<PieceSlot> slots_;
  Blocks blocks_;
  Id last_id_ = 0;
  std::uint64_t clock_ = 0;
  ActivationCounters counters_{};
  StoreCounters transfers_before_{};  ///< of counters_ before they were reset
  std::mutex dropped_mutex_;
  std::vector<Id> dropped_;  // and not yet forgotten
};

}  // namespace

int ActivationStore::slots_in(std::size_t buffer_bytes, std::size_t piece_bytes) {
  const std::size_t pieces = buffer_bytes / std::max<std::size_t>(1, piece_bytes);
  return static_cast<int>(std::clamp<std::size_t>(pieces, 2, std::size_t{1} << 20U));
}

std::size_t ActivationStore::memory_bytes(const ActivationStoreOptions& options) {
  require_usable(options);
  return static_cast<std::size_t>(options.slots) * options.piece_bytes;
}

std::shared_ptr<ActivationStore> ActivationStore::open(const ActivationStoreOptions& options) {
  require_usable(options);
  return std::make_shared<FileActivations>(options);
}

}  // namespace zeroth
