#include "offload/checks.h"
#include "offload/transfers.h"

#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/offload/stores.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

namespace zeroth {
namespace {

enum class SlotState : std::uint8_t {
  kFree,
  kReading,  ///< its block is on its way to memory
  kClean,    ///< as in the files
  kDirty,    ///< newer than the files, and no write is on its way: leased, or the write failed
  kWriting,
};

struct Slot {
  std::span<std::byte> memory{};
  SlotState state = SlotState::kFree;
  int block = -1;
  int leases = 0;
  bool exclusive = false;  ///< the one lease writes
  std::uint64_t used = 0;  ///< by age: when a lease or a transfer began
  bool ahead = false;      ///< read for a lease that has not come yet
  Work transfer{};
};

struct BlockRecord {
  int slot = -1;
  std::uint64_t generation = 0;  ///< 0: never written, so it has its initial value
  std::uint64_t checksum = 0;    ///< of this generation
};

/// Where each block begins: one after the other, each at a multiple of kIoAlignment.
struct FileBlocks {
  std::vector<std::uint64_t> offsets{};
  std::uint64_t total_bytes = 0;
  std::size_t largest = 0;  ///< rounded up to the alignment: the size of a slot
};

FileBlocks place_blocks(std::span<const std::size_t> bytes) {
  FileBlocks places;
  for (const std::size_t size : bytes) {
    ZR_CHECK(size > 0, ErrorCode::kUsage, "a block of a store is empty", {.where = "offload"});
    const std::size_t whole = align_up(size, kIoAlignment);
    places.offsets.push_back(places.total_bytes);
    places.total_bytes += whole;
    places.largest = std::max(places.largest, whole);
  }
  return places;
}

class FileStore final : public StateStore {
 public:
  FileStore(StateBlocks blocks, const FileStoreOptions& options, std::shared_ptr<IoQueue> queue,
            std::span<std::byte> memory)
      : blocks_(std::move(blocks)),
        places_(place_blocks(blocks_.bytes)),
        queue_(std::move(queue)),
        transfers_(options.clock ? options.clock : std::make_shared<TransferClock>()),
        file_(StripedFile::create(options.folders, places_.total_bytes,
                                  {.stripe_bytes = options.stripe_bytes,
                                   .first_folder = options.first_folder,
                                   .file = {.access = options.access}})),
        records_(blocks_.bytes.size()) {
    const std::size_t needed = file_store_memory(blocks_.bytes, options);
    ZR_CHECK(memory.size() >= needed, ErrorCode::kUsage, "the slots of a store have too little memory",
             {.where = "offload.files", .expected = std::to_string(needed), .got = std::to_string(memory.size())});
    ZR_CHECK(
        file_.alignment() <= kIoAlignment && reinterpret_cast<std::uintptr_t>(memory.data()) % kIoAlignment == 0,
        ErrorCode::kUsage, "memory and files of a store are not aligned alike",
        {.where = "offload.files", .expected = std::to_string(kIoAlignment), .got = std::to_string(file_.alignment())});
    slots_.resize(needed / places_.largest);
    for (std::size_t index = 0; index < slots_.size(); ++index)
      slots_[index].memory = memory.subspan(index * places_.largest, places_.largest);
  }

  ~FileStore() override {
    for (const Slot& slot : slots_) {
      if (slot.state == SlotState::kReading || slot.state == SlotState::kWriting) offload::wait_at_end(slot.transfer);
    }
  }

  [[nodiscard]] int num_blocks() const override { return static_cast<int>(records_.size()); }

  bool prefetch(int block) override {
    BlockRecord& record = records_[checked(block)];
    if (record.slot >= 0) {
      slots_[index(record.slot)].used = ++clock_;  // it does not leave for what is asked for next
      return true;
    }
    const int slot = find_slot();
    if (slot < 0) return false;
    bring(slot, block);
    return true;
  }

  [[nodiscard]] StateLease acquire(int block, Access access) override {
    BlockRecord& record = records_[checked(block)];
    ++counters_.leases;
    const bool there = record.slot >= 0;
    if (!there) {
      const int slot = make_room();
      if (access == Access::kOverwrite) {
        take(slot, block);
        slots_[index(slot)].state = SlotState::kClean;
      } else {
        bring(slot, block);
      }
    }
    Slot& slot = slots_[index(record.slot)];
    count_lease(slot, access, there);
    if (slot.state == SlotState::kReading) finish_read(slot);
    if (slot.state == SlotState::kWriting && access != Access::kRead) finish_write(slot);
    require_free(slot, block, access);
    ++slot.leases;
    slot.used = ++clock_;
    if (access != Access::kRead) {
      slot.exclusive = true;
      slot.state = SlotState::kDirty;
    }
    return {*this, block, access, slot.memory.first(blocks_.bytes[index(block)])};
  }

  void flush() override {
    for (Slot& slot : slots_) {
      if (slot.state == SlotState::kDirty && slot.leases == 0) start_write(slot);
    }
    for (Slot& slot : slots_) {
      if (slot.state == SlotState::kWriting) finish_write(slot);
    }
  }

  [[nodiscard]] std::uint64_t resting_bytes(Tier tier) const override {
    return tier == Tier::kFiles ? file_.bytes() : 0;
  }
  [[nodiscard]] std::string file_access() const override {
    for (const auto& file : file_.files()) {
      if (file->access() == FileAccess::kBuffered)
        return "buffered" + (file->reason().empty() ? "" : " (" + file->reason() + ")");
    }
    return "direct";
  }
  [[nodiscard]] std::uint64_t measured_file_bytes() const override {
    std::uint64_t total = 0;
    for (const auto& file : file_.files()) total += offload::bytes_on_disk(*file, "offload.files");
    return total;
  }
  [[nodiscard]] std::uint64_t slot_bytes() const override { return slots_.size() * places_.largest; }
  [[nodiscard]] StoreCounters counters() const override { return counters_; }

 private:
  [[nodiscard]] static std::size_t index(int value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] std::size_t checked(int block) const { return offload::checked_block(block, records_.size()); }
  [[nodiscard]] std::string name(int block) const { return offload::block_name(blocks_, block); }
  /// For the timeline, which alone names waits.
  [[nodiscard]] std::string wait_name(int block) const { return transfers_->keeps_spans() ? name(block) : ""; }

  void count_lease(Slot& slot, Access access, bool there) {
    const std::size_t bytes = in_file(slot).size();
    const bool arrives = slot.state == SlotState::kReading && !slot.transfer.event().ready();
    if (there && slot.state != SlotState::kReading) ++counters_.slot_hits;
    if (access != Access::kRead) counters_.changed_bytes += bytes;
    const bool ahead = std::exchange(slot.ahead, false);
    if (ahead) counters_.ahead_bytes -= bytes;
    if (access == Access::kOverwrite) {
      if (ahead) counters_.unused_bytes += bytes;
      return;
    }
    if (records_[index(slot.block)].generation == 0) return;  // nobody has written it: it has its initial value
    counters_.needed_bytes += bytes;
    if (!ahead) {
      counters_.spared_read_bytes += bytes;
    } else if (!there) {
      ++counters_.on_demand;
    } else {
      ++(arrives ? counters_.late : counters_.prefetched);
    }
  }

  void give_back(int block, Access access) noexcept override {
    Slot& slot = slots_[index(records_[index(block)].slot)];
    --slot.leases;
    if (access == Access::kRead) return;
    slot.exclusive = false;
    BlockRecord& record = records_[index(block)];
    ++record.generation;
    record.checksum = checksum(block);
    try {
      start_write(slot);
    } catch (const std::exception&) {  // it stays dirty: whoever needs the slot, or flush(), writes it again
    }
  }

  /// Of what the block's slot has. Owner, generation and length are part of it.
  [[nodiscard]] std::uint64_t checksum(int block) const {
    const BlockRecord& record = records_[index(block)];
    return offload::checksum_of(slots_[index(record.slot)].memory.first(blocks_.bytes[index(block)]), block,
                                record.generation);
  }

  [[nodiscard]] std::span<std::byte> in_file(const Slot& slot) const {
    return slot.memory.first(align_up(blocks_.bytes[index(slot.block)], kIoAlignment));
  }

  void start(Slot& slot, IoOp op) {
    std::vector<IoRequest> requests =
        file_.requests(op, places_.offsets[index(slot.block)], in_file(slot), name(slot.block));
    for (IoRequest& request : requests) request.clock = transfers_;
    slot.transfer = queue_->submit(requests);
    slot.state = op == IoOp::kRead ? SlotState::kReading : SlotState::kWriting;
    slot.used = ++clock_;
    (op == IoOp::kRead ? counters_.reads : counters_.writes) += 1;
    (op == IoOp::kRead ? counters_.read_bytes : counters_.write_bytes) += in_file(slot).size();
    if (op != IoOp::kRead) return;
    slot.ahead = true;
    counters_.ahead_bytes += in_file(slot).size();
  }
  void start_write(Slot& slot) { start(slot, IoOp::kWrite); }

  void take(int number, int block) {
    Slot& slot = slots_[index(number)];
    slot.block = block;
    slot.used = ++clock_;
    records_[index(block)].slot = number;
  }

  void free_slot(Slot& slot) {
    if (std::exchange(slot.ahead, false)) {
      counters_.ahead_bytes -= in_file(slot).size();
      counters_.unused_bytes += in_file(slot).size();
    }
    records_[index(slot.block)].slot = -1;
    slot.block = -1;
    slot.state = SlotState::kFree;
    slot.transfer = {};
  }

  void bring(int number, int block) {
    take(number, block);
    Slot& slot = slots_[index(number)];
    if (records_[index(block)].generation == 0) {
      const std::span<std::byte> bytes = slot.memory.first(blocks_.bytes[index(block)]);
      std::memset(bytes.data(), 0, bytes.size());
      if (blocks_.initial) blocks_.initial(block, bytes);
      slot.state = SlotState::kClean;
      return;
    }
    try {
      start(slot, IoOp::kRead);
    } catch (...) {
      free_slot(slot);
      throw;
    }
  }

  void finish_read(Slot& slot) {
    const int block = slot.block;
    try {
      offload::wait_for(slot.transfer, counters_.wait_ns, *transfers_, wait_name(block));
    } catch (...) {
      if (offload::has_ended(slot.transfer)) free_slot(slot);
      throw;
    }
    slot.transfer = {};
    slot.state = SlotState::kClean;
    const BlockRecord& record = records_[index(block)];
    const std::uint64_t found = checksum(block);
    if (found == record.checksum) return;
    free_slot(slot);
    throw Error(ErrorCode::kIo, "a block that was read is not the one that was written",
                {.where = "offload.files",
                 .which = name(block) + ", block " + std::to_string(block) + " at byte " +
                          std::to_string(places_.offsets[index(block)]) + " of the files in " + folders(),
                 .expected = offload::hex(record.checksum) + " (generation " + std::to_string(record.generation) +
                             ", " + std::to_string(blocks_.bytes[index(block)]) + " bytes)",
                 .got = offload::hex(found),
                 .hint = "the disk or what is between it and memory changed bytes: look at its health, and go on "
                         "from a checkpoint"});
  }

  void finish_write(Slot& slot) {
    try {
      offload::wait_for(slot.transfer, counters_.wait_ns, *transfers_, wait_name(slot.block));
    } catch (...) {
      if (offload::has_ended(slot.transfer)) slot.state = SlotState::kDirty;
      throw;
    }
    slot.transfer = {};
    slot.state = SlotState::kClean;
  }

  /// A slot that can be had without waiting, or -1.
  [[nodiscard]] int find_slot() {
    queue_->progress();
    int oldest = -1;
    for (int number = 0; number < static_cast<int>(slots_.size()); ++number) {
      Slot& slot = slots_[index(number)];
      if (slot.state == SlotState::kFree) return number;
      if (slot.state == SlotState::kWriting && slot.leases == 0 && slot.transfer.event().ready()) finish_write(slot);
      if (slot.state != SlotState::kClean || slot.leases > 0) continue;
      if (oldest < 0 || slot.used < slots_[index(oldest)].used) oldest = number;
    }
    if (oldest >= 0) free_slot(slots_[index(oldest)]);
    return oldest;
  }

  [[nodiscard]] int make_room() {
    if (const int number = find_slot(); number >= 0) return number;
    // The oldest write; else a write that failed, once more; else the oldest read that nobody has asked for.
    for (const SlotState state : {SlotState::kWriting, SlotState::kDirty, SlotState::kReading}) {
      Slot* oldest = nullptr;
      for (Slot& slot : slots_) {
        if (slot.state == state && slot.leases == 0 && (oldest == nullptr || slot.used < oldest->used)) oldest = &slot;
      }
      if (oldest == nullptr) continue;
      if (state == SlotState::kDirty) start_write(*oldest);
      if (state == SlotState::kReading) {
        finish_read(*oldest);
      } else {
        finish_write(*oldest);
      }
      if (oldest->state != SlotState::kFree) free_slot(*oldest);
      return static_cast<int>(oldest - slots_.data());
    }
    throw Error(ErrorCode::kUsage, "every slot of a store is leased",
                {.where = "offload.files",
                 .expected = "at most " + std::to_string(slots_.size()) + " leases at once",
                 .hint = "end a lease first, or give the store more slots (buffer_count)"});
  }

  void require_free(const Slot& slot, int block, Access access) const {
    if (slot.leases == 0 || (access == Access::kRead && !slot.exclusive)) return;
    throw Error(
        ErrorCode::kUsage, "a block of states is leased already",
        {.where = "offload.files", .which = name(block), .expected = "one lease that writes, or some that read"});
  }

  [[nodiscard]] std::string folders() const {
    std::string all;
    for (const auto& file : file_.files()) all += (all.empty() ? "" : ", ") + file->folder();
    return all;
  }

  StateBlocks blocks_;
  FileBlocks places_;
  std::shared_ptr<IoQueue> queue_;
  std::shared_ptr<TransferClock> transfers_;
  StripedFile file_;
  std::vector<BlockRecord> records_;
  std::vector<Slot> slots_;
  StoreCounters counters_{};
  std::uint64_t clock_ = 0;
};

}  // namespace

std::size_t file_store_memory(std::span<const std::size_t> block_bytes, const FileStoreOptions& options) {
  ZR_CHECK(options.slots >= 2, ErrorCode::kUsage, "a store in files has too few slots",
           {.where = "offload.files", .expected = "2 or more", .got = std::to_string(options.slots)});
  const std::size_t slots = std::min(block_bytes.size(), static_cast<std::size_t>(options.slots));
  return slots * place_blocks(block_bytes).largest;
}

std::uint64_t file_store_bytes(std::span<const std::size_t> block_bytes, const FileStoreOptions& options) {
  return align_up(place_blocks(block_bytes).total_bytes, options.stripe_bytes);
}

std::unique_ptr<StateStore> make_file_store(StateBlocks blocks, const FileStoreOptions& options,
                                            std::shared_ptr<IoQueue> queue, std::span<std::byte> memory) {
  ZR_CHECK(!blocks.bytes.empty(), ErrorCode::kUsage, "a store has no blocks", {.where = "offload.files"});
  return std::make_unique<FileStore>(std::move(blocks), options, std::move(queue), memory);
}

}  // namespace zeroth
