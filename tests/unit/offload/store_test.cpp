// Stores of blocks: whatever the order of leases, faults and slots, a block has the bytes that were last written to it,
// or an error says that it has not.
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/device/memory.h>
#include <zeroth/io/faults.h>
#include <zeroth/offload/stores.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

std::string folder() {
  return std::filesystem::temp_directory_path().string();
}

/// A store with its memory and queue.
struct Made {
  Arena arena;
  std::shared_ptr<IoQueue> queue;
  std::unique_ptr<StateStore> store;
};

struct Shape {
  std::vector<std::size_t> bytes{};
  int slots = 3;
  int folders = 1;
  IoEngineKind engine = IoEngineKind::kThreads;
  FileAccess access = FileAccess::kDirect;
  std::shared_ptr<IoFaults> faults{};
  double ratio = 1.0;   ///< below 1: every other block in memory; 0: all
  int cached = 0;       ///< places of a cache over the files
  bool rounds = false;  ///< the cache knows an order
  std::function<void()> watch{};
};

StateBlocks blocks_of(std::vector<std::size_t> bytes) {
  return {.bytes = std::move(bytes),
          .name = [](int block) { return "moments of layer " + std::to_string(block); },
          .initial = [](int block, std::span<std::byte> out) { std::memset(out.data(), block + 1, out.size()); }};
}

Made made(const Shape& shape) {
  Made result;
  FileStoreOptions options{.stripe_bytes = 8192, .access = shape.access, .slots = shape.slots};
  options.folders.assign(static_cast<std::size_t>(shape.folders), folder());
  result.queue =
      open_io_queue(folder(), {.engine = shape.engine, .depth = 4, .watch = shape.watch, .faults = shape.faults});
  std::vector<std::size_t> in_memory;
  std::vector<std::size_t> in_files;
  std::vector<int> memory_numbers;
  std::vector<int> file_numbers;
  std::vector<bool> second;
  for (int block = 0; block < static_cast<int>(shape.bytes.size()); ++block) {
    const bool filed = shape.ratio >= 1.0 || (shape.ratio > 0.0 && block % 2 == 1);
    second.push_back(filed);
    (filed ? in_files : in_memory).push_back(shape.bytes[static_cast<std::size_t>(block)]);
    (filed ? file_numbers : memory_numbers).push_back(block);
  }
  const std::size_t slots = in_files.empty() ? 0 : file_store_memory(in_files, options);
  const std::size_t rest = memory_store_memory(in_memory);
  CacheOptions cache{.places = shape.cached};
  const std::size_t cached = shape.cached > 0 ? cached_store_memory(in_files, cache) : 0;
  result.arena = Arena::create(ArenaKind::kPrivate, slots + rest + cached + kIoAlignment, "store test");
  const auto numbered = [](std::vector<std::size_t> bytes, std::vector<int> numbers) {
    StateBlocks blocks = blocks_of(std::move(bytes));
    blocks.initial = [numbers](int block, std::span<std::byte> out) {
      std::memset(out.data(), numbers[static_cast<std::size_t>(block)] + 1, out.size());
    };
    return blocks;
  };
  if (in_files.empty()) {
    result.store = make_memory_store(numbered(in_memory, memory_numbers), result.arena.reserve(rest, 64));
    return result;
  }
  std::unique_ptr<StateStore> filed = make_file_store(numbered(in_files, file_numbers), options, result.queue,
                                                      result.arena.reserve(slots, kIoAlignment));
  if (shape.cached > 0) {
    for (int block = 0; shape.rounds && block < filed->num_blocks(); ++block) cache.order.push_back(block);
    filed =
        make_cached_store(std::move(filed), numbered(in_files, file_numbers), cache, result.arena.reserve(cached, 64));
  }
  result.store =
      in_memory.empty()
          ? std::move(filed)
          : make_split_store(make_memory_store(numbered(in_memory, memory_numbers), result.arena.reserve(rest, 64)),
                             std::move(filed), second);
  return result;
}

Bytes read(StateStore& store, int block) {
  const StateLease lease = store.acquire(block, Access::kRead);
  return {lease.bytes().begin(), lease.bytes().end()};
}

void write(StateStore& store, int block, const Bytes& bytes, Access access) {
  const StateLease lease = store.acquire(block, access);
  std::ranges::copy(bytes, lease.bytes().begin());
}

/// Random leases, prefetches and flushes against a map; with faults, calls that fail are made again.
void compare_with_map(const Shape& shape, unsigned seed, int operations) {
  std::mt19937 random(seed);
  const auto draw = [&random](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  Made one = made(shape);
  std::map<int, Bytes> expected;
  const int count = static_cast<int>(shape.bytes.size());
  for (int block = 0; block < count; ++block)
    expected[block] = Bytes(shape.bytes[static_cast<std::size_t>(block)], static_cast<std::byte>(block + 1));
  const auto insist = [&](const auto& call) {
    for (int attempt = 0;; ++attempt) {
      try {
        return call();
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kIo) << error.what();
        ASSERT_LT(attempt, 50) << error.what();
      }
    }
  };
  for (int operation = 0; operation < operations; ++operation) {
    const int block = draw(count);
    Bytes& kept = expected[block];
    switch (draw(5)) {
      case 0:
        insist([&] { (void)one.store->prefetch(block); });
        break;
      case 1:
        insist([&] { one.store->flush(); });
        break;
      case 2:
        insist([&] { ASSERT_EQ(read(*one.store, block), kept) << "operation " << operation << " of seed " << seed; });
        break;
      case 3: {
        for (std::byte& byte : kept) byte = static_cast<std::byte>(random());
        insist([&] { write(*one.store, block, kept, Access::kOverwrite); });
        break;
      }
      default: {
        const auto at = static_cast<std::size_t>(draw(static_cast<int>(kept.size())));
        kept[at] ^= std::byte{0x5a};
        insist([&] {
          const StateLease lease = one.store->acquire(block, Access::kUpdate);
          lease.bytes()[at] = kept[at];
          ASSERT_TRUE(std::ranges::equal(lease.bytes(), kept));
        });
      }
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
  insist([&] { one.store->flush(); });
  for (int block = 0; block < count; ++block)
    insist([&] { EXPECT_EQ(read(*one.store, block), expected[block]) << "block " << block << " of seed " << seed; });
}

const std::vector<std::size_t> kSizes{1, 4096, 5000, 20'000, 64, 8192, 12'289};

TEST(StateStore, HasWhatWasWrittenWhateverTheOrder) {
  for (const int slots : {2, 3, 7})
    compare_with_map({.bytes = kSizes, .slots = slots}, 11U + static_cast<unsigned>(slots), 300);
  compare_with_map({.bytes = kSizes, .slots = 3, .folders = 3}, 21, 300);
  compare_with_map({.bytes = kSizes, .slots = 3, .ratio = 0.5}, 22, 300);
  compare_with_map({.bytes = kSizes, .slots = 2, .access = FileAccess::kBuffered}, 23, 300);
  compare_with_map({.bytes = kSizes, .slots = 3, .engine = IoEngineKind::kAuto}, 24, 300);
  compare_with_map({.bytes = kSizes, .ratio = 0.0}, 25, 300);
  for (const bool rounds : {false, true}) {
    for (const int cached : {1, 3, 9})
      compare_with_map({.bytes = kSizes, .slots = 2, .cached = cached, .rounds = rounds}, 26, 300);
    compare_with_map({.bytes = kSizes, .slots = 2, .ratio = 0.5, .cached = 2, .rounds = rounds}, 27, 300);
  }
}

TEST(LongStateStore, HasWhatWasWrittenWhateverTheOrder) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    compare_with_map({.bytes = kSizes,
                      .slots = 2 + static_cast<int>(seed % 4),
                      .folders = 1 + static_cast<int>(seed % 2),
                      .engine = seed % 3 == 0 ? IoEngineKind::kAuto : IoEngineKind::kThreads,
                      .ratio = seed % 5 == 0 ? 0.5 : 1.0,
                      .cached = static_cast<int>(seed % 4),
                      .rounds = seed % 8 < 4},
                     seed, 1500);
  }
}

TEST(StateStore, LosesNothingWhenTransfersFail) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const auto faults =
        std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kErrno, .probability = 0.05},
                                                        {.kind = IoFaultKind::kShort, .probability = 0.1},
                                                        {.kind = IoFaultKind::kRefuse, .probability = 0.05}},
                                   seed);
    compare_with_map(
        {.bytes = kSizes, .slots = 3, .faults = faults, .cached = static_cast<int>(seed % 2) * 2, .rounds = seed == 3},
        seed, 300);
    EXPECT_GT(faults->count(IoFaultKind::kErrno), 0U);
  }
}

TEST(StateStore, AFlippedBitIsAnErrorAndNeverANumber) {
  const auto faults =
      std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kFlip, .probability = 1.0}}, 3);
  Made one = made({.bytes = {5000, 5000, 5000}, .slots = 2, .faults = faults});
  for (int block = 0; block < 3; ++block) write(*one.store, block, Bytes(5000, std::byte{7}), Access::kOverwrite);
  one.store->flush();
  int found = 0;
  for (int block = 0; block < 3; ++block) {
    std::string text;
    try {
      (void)read(*one.store, block);
      continue;  // it was still in a slot
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_THAT(text,
                AllOf(HasSubstr("a block that was read is not the one that was written"), HasSubstr("moments of layer"),
                      HasSubstr("generation 1, 5000 bytes"), HasSubstr("look at its health")));
    ++found;
  }
  EXPECT_GE(found, 1);
}

TEST(StateStore, ReadsAheadAndWritesBehind) {
  Made one = made({.bytes = std::vector<std::size_t>(6, 16'384), .slots = 4});
  for (int block = 0; block < 6; ++block) write(*one.store, block, Bytes(16'384, std::byte{9}), Access::kOverwrite);
  one.store->flush();
  const StoreCounters before = one.store->counters();
  for (int block = 0; block < 6; ++block) {
    for (int ahead = block; ahead < std::min(block + 3, 6); ++ahead) (void)one.store->prefetch(ahead);
    (void)read(*one.store, block);
  }
  const StoreCounters after = one.store->counters();
  EXPECT_EQ(after.on_demand, before.on_demand) << "every block had been asked for before its lease";
  EXPECT_LE(after.reads - before.reads, 6U);
  EXPECT_EQ(after.writes, before.writes) << "what is read is not written";
}

/// Blocks that `rounds` rounds of updates in order read and write, behind a first one.
StoreCounters traffic_of(const Shape& shape, int rounds) {
  Made one = made(shape);
  const auto round = [&one] {
    for (int block = 0; block < one.store->num_blocks(); ++block) {
      const StateLease lease = one.store->acquire(block, Access::kUpdate);
      lease.bytes()[0] ^= std::byte{1};
    }
  };
  round();
  const StoreCounters before = one.store->counters();
  for (int number = 0; number < rounds; ++number) round();
  const StoreCounters after = one.store->counters();
  return after.since(before);
}

TEST(StateStore, ACacheThatKnowsTheOrderSparesAsManyBlocksARoundAsItHasPlaces) {
  const std::vector<std::size_t> ten(10, 4096);
  for (const int places : {1, 4, 9}) {
    const StoreCounters counted = traffic_of({.bytes = ten, .slots = 2, .cached = places, .rounds = true}, 3);
    const auto passing = static_cast<std::uint64_t>(3 * (10 - places));
    EXPECT_EQ(counted.leases, 30U);
    EXPECT_LE(counted.reads, passing) << places << " places";  // a slot may still have one
    EXPECT_EQ(counted.writes, passing) << places << " places";
  }
  // The same blocks, all of them: the one that was used longest ago is the next to be used.
  EXPECT_EQ(traffic_of({.bytes = ten, .slots = 2, .cached = 4}, 3).writes, 30U);
  const StoreCounters all = traffic_of({.bytes = ten, .slots = 2, .cached = 10}, 3);
  EXPECT_EQ(all.reads + all.writes, 0U) << "everything has its place";
}

TEST(StateStore, ACacheWritesBackWhatGivesWay) {
  Made one = made({.bytes = {4096, 4096, 4096}, .slots = 2, .cached = 1});
  write(*one.store, 0, Bytes(4096, std::byte{7}), Access::kOverwrite);
  EXPECT_EQ(one.store->counters().writes, 0U) << "it is in the cache";
  write(*one.store, 1, Bytes(4096, std::byte{8}), Access::kOverwrite);
  EXPECT_EQ(one.store->counters().writes, 1U);
  one.store->flush();
  EXPECT_EQ(one.store->counters().writes, 2U);
  one.store->flush();
  EXPECT_EQ(one.store->counters().writes, 2U) << "nothing has changed";
  EXPECT_EQ(one.store->slot_bytes(), 3U * 4096);
  const StateLease kept = one.store->acquire(1, Access::kUpdate);
  EXPECT_EQ(read(*one.store, 0), Bytes(4096, std::byte{7})) << "past the cache, whose place is leased";
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)one.store->acquire(1, Access::kRead); }),
              AllOf(HasSubstr("leased already"), HasSubstr("moments of layer 1")));
}

TEST(StateStore, AWaitThatEndsBeforeItsTransferKeepsTheSlotAndTheMemory) {
  const auto faults = std::make_shared<IoFaults>(std::vector<IoFault>{
      {.kind = IoFaultKind::kDelay, .probability = 1, .delay = Milliseconds{300}}});  // also of the queue's probe
  bool others_stopped = false;
  Made one = made({.bytes = {4096, 4096, 4096}, .slots = 2, .faults = faults, .watch = [&others_stopped] {
                     if (others_stopped) throw Error(ErrorCode::kAborted, "another rank has stopped the job");
                   }});
  for (int block = 0; block < 3; ++block) write(*one.store, block, Bytes(4096, std::byte{7}), Access::kOverwrite);
  one.store->flush();
  others_stopped = true;
  EXPECT_THAT(test::error_of(ErrorCode::kAborted, [&] { (void)one.store->acquire(0, Access::kRead); }),
              HasSubstr("has stopped the job"));
  const std::uint64_t reads = one.store->counters().reads;
  others_stopped = false;
  EXPECT_EQ(read(*one.store, 0), Bytes(4096, std::byte{7}));
  EXPECT_EQ(one.store->counters().reads, reads) << "the read went on";
  EXPECT_TRUE(one.store->prefetch(1));
  others_stopped = true;
  one.store.reset();
  EXPECT_EQ(one.queue->pending(), 0U) << "memory goes only after its transfers";
}

TEST(StateStore, BytesAreThoseOfTheFormula) {
  const Shape shape{.bytes = {5000, 4096, 1}, .slots = 2};
  Made one = made(shape);
  const std::uint64_t blocks = 8192 + 4096 + 4096;
  EXPECT_EQ(one.store->resting_bytes(Tier::kFiles), (blocks + 8191) / 8192 * 8192);
  EXPECT_EQ(one.store->slot_bytes(), 2U * 8192);
  EXPECT_GE(one.store->measured_file_bytes(), one.store->resting_bytes(Tier::kFiles));
  for (int block = 0; block < 3; ++block)
    write(*one.store, block, Bytes(shape.bytes[static_cast<std::size_t>(block)]), Access::kOverwrite);
  one.store->flush();
  EXPECT_EQ(one.store->counters().write_bytes, blocks);
  EXPECT_EQ(one.store->counters().read_bytes, 0U) << "nobody reads what nobody wrote";
  EXPECT_EQ(one.queue->counters().bytes_written, blocks);
}

TEST(StateStore, LeasesThatCannotBeAreRefused) {
  Made one = made({.bytes = {4096, 4096, 4096}, .slots = 2});
  const StateLease written = one.store->acquire(0, Access::kUpdate);
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)one.store->acquire(0, Access::kRead); }),
              AllOf(HasSubstr("leased already"), HasSubstr("moments of layer 0")));
  const StateLease first = one.store->acquire(1, Access::kRead);
  const StateLease second = one.store->acquire(1, Access::kRead);
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)one.store->acquire(1, Access::kUpdate); }),
              HasSubstr("leased already"));
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)one.store->acquire(2, Access::kRead); }),
              AllOf(HasSubstr("every slot of a store is leased"), HasSubstr("at most 2 leases")));
  EXPECT_FALSE(one.store->prefetch(2));
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)one.store->acquire(3, Access::kRead); }),
              HasSubstr("no such block"));
}

}  // namespace
}  // namespace zeroth
