#include "offload/checks.h"

#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/offload/stores.h>

#include <cstring>
#include <utility>

namespace zeroth {
namespace {

constexpr std::size_t kBlockAlignment = 64;

class MemoryStore final : public StateStore {
 public:
  MemoryStore(StateBlocks blocks, std::span<std::byte> memory) : blocks_(std::move(blocks)), memory_(memory) {
    const std::size_t needed = memory_store_memory(blocks_.bytes);
    ZR_CHECK(memory.size() >= needed, ErrorCode::kUsage, "the blocks of a store have too little memory",
             {.where = "offload.memory", .expected = std::to_string(needed), .got = std::to_string(memory.size())});
    std::size_t offset = 0;
    for (int block = 0; block < num_blocks(); ++block) {
      offsets_.push_back(offset);
      const std::span<std::byte> bytes = bytes_of(block);
      std::memset(bytes.data(), 0, bytes.size());
      if (blocks_.initial) blocks_.initial(block, bytes);
      offset += align_up(bytes.size(), kBlockAlignment);
    }
    leases_.assign(blocks_.bytes.size(), 0);
  }

  [[nodiscard]] int num_blocks() const override { return static_cast<int>(blocks_.bytes.size()); }
  bool prefetch(int block) override {
    (void)checked(block);
    return true;
  }
  [[nodiscard]] StateLease acquire(int block, Access access) override {
    int& leases = leases_[checked(block)];
    ZR_CHECK(leases == 0 || (leases > 0 && access == Access::kRead), ErrorCode::kUsage,
             "a block of states is leased already",
             {.where = "offload.memory",
              .which = offload::block_name(blocks_, block),
              .expected = "one lease that writes, or some that read"});
    leases = access == Access::kRead ? leases + 1 : kWritten;
    ++counters_.leases;
    return {*this, block, access, bytes_of(block)};
  }
  void flush() override {}
  [[nodiscard]] std::uint64_t resting_bytes(Tier tier) const override {
    return tier == Tier::kMemory ? memory_store_memory(blocks_.bytes) : 0;
  }
  [[nodiscard]] std::uint64_t slot_bytes() const override { return 0; }
  [[nodiscard]] StoreCounters counters() const override { return counters_; }

 private:
  static constexpr int kWritten = -1;

  [[nodiscard]] std::size_t checked(int block) const { return offload::checked_block(block, blocks_.bytes.size()); }
  [[nodiscard]] std::span<std::byte> bytes_of(int block) const {
    const auto index = static_cast<std::size_t>(block);
    return memory_.subspan(offsets_[index], blocks_.bytes[index]);
  }
  void give_back(int block, Access) noexcept override {
    int& leases = leases_[static_cast<std::size_t>(block)];
    leases = leases == kWritten ? 0 : leases - 1;
  }

  StateBlocks blocks_;
  std::span<std::byte> memory_;
  std::vector<std::size_t> offsets_;
  std::vector<int> leases_;  // that read; kWritten: one that writes
  StoreCounters counters_{};
};

}  // namespace

std::size_t memory_store_memory(std::span<const std::size_t> block_bytes) {
  std::size_t total = 0;
  for (const std::size_t bytes : block_bytes) total += align_up(bytes, kBlockAlignment);
  return total;
}

std::unique_ptr<StateStore> make_memory_store(StateBlocks blocks, std::span<std::byte> memory) {
  return std::make_unique<MemoryStore>(std::move(blocks), memory);
}

}  // namespace zeroth
