#include "offload/checks.h"

#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/offload/stores.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

constexpr std::size_t kPlaceAlignment = 64;
constexpr std::size_t kNever = static_cast<std::size_t>(-1);

std::size_t place_bytes(std::span<const std::size_t> block_bytes) {
  std::size_t largest = 0;
  for (const std::size_t bytes : block_bytes) largest = std::max(largest, bytes);
  return align_up(largest, kPlaceAlignment);
}

std::size_t places_of(std::span<const std::size_t> block_bytes, const CacheOptions& options) {
  ZR_CHECK(options.places >= 1, ErrorCode::kUsage, "a cache of a store has no place",
           {.where = "offload.cache", .expected = "1 or more", .got = std::to_string(options.places)});
  return std::min(block_bytes.size(), static_cast<std::size_t>(options.places));
}

/// How far ahead each block is used next, in a use that goes in rounds.
class Rounds {
 public:
  Rounds(std::vector<int> order, std::size_t blocks) : order_(std::move(order)), at_(blocks) {
    for (std::size_t position = 0; position < order_.size(); ++position)
      at_[offload::checked_block(order_[position], blocks)].push_back(position);
  }

  [[nodiscard]] bool known() const { return !order_.empty(); }
  /// The block is used: the round goes on behind its next place in the order. One that is not in it moves nothing.
  void use(int block) {
    if (const std::size_t ahead = distance(block); ahead != kNever) now_ = (now_ + ahead + 1) % order_.size();
  }
  /// Uses of other blocks before the block's next one.
  [[nodiscard]] std::size_t distance(int block) const {
    const std::vector<std::size_t>& positions = at_[static_cast<std::size_t>(block)];
    if (positions.empty()) return kNever;
    const auto next = std::ranges::lower_bound(positions, now_);
    return next != positions.end() ? *next - now_ : positions.front() + order_.size() - now_;
  }

 private:
  std::vector<int> order_;
  std::vector<std::vector<std::size_t>> at_;  ///< positions of each block in the order
  std::size_t now_ = 0;                       ///< in the order
};

class CachedStore final : public StateStore {
 public:
  CachedStore(std::unique_ptr<StateStore> slower, StateBlocks blocks, CacheOptions options, std::span<std::byte> memory)
      : slower_(std::move(slower)),
        blocks_(std::move(blocks)),
        places_(places_of(blocks_.bytes, options)),
        records_(blocks_.bytes.size()),
        rounds_(std::move(options.order), blocks_.bytes.size()) {
    ZR_CHECK(slower_->num_blocks() == num_blocks(), ErrorCode::kUsage, "a cache has other blocks than its store",
             {.where = "offload.cache",
              .expected = std::to_string(slower_->num_blocks()),
              .got = std::to_string(num_blocks())});
    const std::size_t size = place_bytes(blocks_.bytes);
    ZR_CHECK(memory.size() >= size * places_.size(), ErrorCode::kUsage, "a cache of a store has too little memory",
             {.where = "offload.cache",
              .expected = std::to_string(size * places_.size()),
              .got = std::to_string(memory.size())});
    for (std::size_t place = 0; place < places_.size(); ++place)
      places_[place].memory = memory.subspan(place * size, size);
  }

  [[nodiscard]] int num_blocks() const override { return static_cast<int>(blocks_.bytes.size()); }

  bool prefetch(int block) override {
    return records_[offload::checked_block(block, records_.size())].place >= 0 || slower_->prefetch(block);
  }

  [[nodiscard]] StateLease acquire(int block, Access access) override {
    Record& record = records_[offload::checked_block(block, records_.size())];
    require_free(record, block, access);
    rounds_.use(block);
    if (record.place >= 0) {
      ++hits_;
      if (access != Access::kOverwrite) hit_bytes_ += file_bytes(block);
    } else if (record.leases == 0) {
      admit(block, access);
    }
    std::span<std::byte> bytes;
    if (record.place >= 0) {
      Place& place = places_[index(record.place)];
      bytes = place.memory.first(blocks_.bytes[index(block)]);
      place.used = ++clock_;
      if (access != Access::kRead) kept_bytes_ += file_bytes(block);
    } else {
      record.passing.push_back(slower_->acquire(block, access));
      bytes = record.passing.back().bytes();
    }
    ++leases_;
    ++record.leases;
    record.exclusive = access != Access::kRead;
    return {*this, block, access, bytes};
  }

  void flush() override {
    for (Place& place : places_) {
      if (place.dirty && records_[index(place.block)].leases == 0) write_back(place);
    }
    slower_->flush();
  }

  [[nodiscard]] std::uint64_t resting_bytes(Tier tier) const override { return slower_->resting_bytes(tier); }
  [[nodiscard]] std::uint64_t measured_file_bytes() const override { return slower_->measured_file_bytes(); }
  [[nodiscard]] std::string file_access() const override { return slower_->file_access(); }
  [[nodiscard]] std::uint64_t slot_bytes() const override {
    return slower_->slot_bytes() + places_.size() * place_bytes(blocks_.bytes);
  }
  [[nodiscard]] StoreCounters counters() const override {
    StoreCounters counters = slower_->counters();
    counters.leases = leases_;
    counters.slot_hits += hits_;
    counters.needed_bytes += hit_bytes_;
    counters.spared_read_bytes += hit_bytes_;
    // What goes to the slower store later was changed here, once.
    counters.changed_bytes += kept_bytes_ - written_back_bytes_;
    counters.spared_write_bytes += kept_bytes_ - written_back_bytes_;
    return counters;
  }

 private:
  struct Place {
    std::span<std::byte> memory{};
    int block = -1;
    bool dirty = false;      ///< newer than in the slower store
    std::uint64_t used = 0;  ///< by age
  };
  struct Record {
    int place = -1;
    int leases = 0;
    bool exclusive = false;             ///< the one lease writes
    std::vector<StateLease> passing{};  ///< of the slower store, while the block is not in the cache
  };
  [[nodiscard]] static std::size_t index(int value) { return static_cast<std::size_t>(value); }
  [[nodiscard]] std::size_t file_bytes(int block) const { return align_up(blocks_.bytes[index(block)], kIoAlignment); }

  void require_free(const Record& record, int block, Access access) const {
    ZR_CHECK(record.leases == 0 || (access == Access::kRead && !record.exclusive), ErrorCode::kUsage,
             "a block of states is leased already",
             {.where = "offload.cache",
              .which = offload::block_name(blocks_, block),
              .expected = "one lease that writes, or some that read"});
  }

  /// The place that the block may have, or null: it passes by.
  [[nodiscard]] Place* place_for(int block) {
    Place* best = nullptr;
    for (Place& place : places_) {
      if (place.block < 0) return &place;
      if (records_[index(place.block)].leases > 0) continue;
      if (best == nullptr || gives_way_before(place, *best)) best = &place;
    }
    if (best != nullptr && rounds_.known() && rounds_.distance(block) >= rounds_.distance(best->block)) return nullptr;
    return best;
  }
  [[nodiscard]] bool gives_way_before(const Place& one, const Place& other) const {
    return rounds_.known() ? rounds_.distance(one.block) > rounds_.distance(other.block) : one.used < other.used;
  }

  void admit(int block, Access access) {
    Place* const place = place_for(block);
    if (place == nullptr) return;
    if (place->dirty) write_back(*place);
    const std::size_t bytes = blocks_.bytes[index(block)];
    if (access != Access::kOverwrite) {
      const StateLease lease = slower_->acquire(block, Access::kRead);
      std::memcpy(place->memory.data(), lease.bytes().data(), bytes);
    }
    if (place->block >= 0) records_[index(place->block)].place = -1;
    place->block = block;
    records_[index(block)].place = static_cast<int>(place - places_.data());
  }

  void write_back(Place& place) {
    const StateLease lease = slower_->acquire(place.block, Access::kOverwrite);
    std::memcpy(lease.bytes().data(), place.memory.data(), lease.bytes().size());
    place.dirty = false;
    written_back_bytes_ += file_bytes(place.block);
  }

  void give_back(int block, Access access) noexcept override {
    Record& record = records_[index(block)];
    --record.leases;
    if (access != Access::kRead) record.exclusive = false;
    if (record.place < 0) {
      record.passing.pop_back();
    } else if (access != Access::kRead) {
      places_[index(record.place)].dirty = true;
    }
  }

  std::unique_ptr<StateStore> slower_;
  StateBlocks blocks_;
  std::vector<Place> places_;
  std::vector<Record> records_;  ///< their leases end before the store
  Rounds rounds_;
  std::uint64_t clock_ = 0;
  std::uint64_t leases_ = 0;
  std::uint64_t hits_ = 0;
  std::uint64_t hit_bytes_ = 0;           ///< of hits that need the bytes
  std::uint64_t kept_bytes_ = 0;          ///< of leases that write to the cache
  std::uint64_t written_back_bytes_ = 0;  ///< of these, what went to the slower store
};

}  // namespace

std::size_t cached_store_memory(std::span<const std::size_t> block_bytes, const CacheOptions& options) {
  return places_of(block_bytes, options) * place_bytes(block_bytes);
}

std::unique_ptr<StateStore> make_cached_store(std::unique_ptr<StateStore> slower, StateBlocks blocks,
                                              CacheOptions options, std::span<std::byte> memory) {
  return std::make_unique<CachedStore>(std::move(slower), std::move(blocks), std::move(options), memory);
}

}  // namespace zeroth
