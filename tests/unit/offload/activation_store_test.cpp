// Activations in files: a block that is read has the bytes that were put, or an error says that it has not; memory is
// the slots', whatever comes; place in the files is used again.
#include "offload/file_space.h"
#include "support/error_of.h"

#include <zeroth/base/error.h>
#include <zeroth/io/faults.h>
#include <zeroth/offload/activation_store.h>
#include <zeroth/offload/stores.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

ActivationStoreOptions options_of(int slots, std::shared_ptr<IoFaults> faults = {}) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  return {.folders = {folder, folder},
          .piece_bytes = 8192,
          .slots = slots,
          .segment_bytes = 65'536,
          .io = {.engine = IoEngineKind::kThreads, .depth = 4, .num_threads = 2, .faults = std::move(faults)}};
}

Bytes bytes_of(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Bytes read(ActivationStore& store, ActivationStore::Id id, std::size_t bytes) {
  Bytes out(bytes);
  store.get(id, out);
  return out;
}

/// Random puts, gets and drops against a map; with faults, calls that fail are made again.
void compare_with_map(const ActivationStoreOptions& options, unsigned seed, int operations) {
  std::mt19937 random(seed);
  const auto draw = [&random](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  const auto store = ActivationStore::open(options);
  std::map<ActivationStore::Id, Bytes> expected;
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
  const auto some = [&] { return std::next(expected.begin(), static_cast<std::ptrdiff_t>(draw(expected.size()))); };
  for (int operation = 0; operation < operations; ++operation) {
    const std::size_t kind = draw(5);
    if (kind < 2 || expected.empty()) {
      const Bytes bytes = bytes_of(1 + draw(draw(4) == 0 ? 60'000 : 9000), static_cast<unsigned>(random()));
      insist([&] { expected[store->put(bytes, "input of unit 3")] = bytes; });
    } else if (kind < 4) {
      const auto& [id, bytes] = *some();
      insist([&, id = id, &bytes = bytes] {
        ASSERT_EQ(read(*store, id, bytes.size()), bytes) << "operation " << operation << " of seed " << seed;
      });
    } else {
      const auto gone = some();
      store->drop(gone->first);
      expected.erase(gone);
    }
    if (::testing::Test::HasFatalFailure()) return;
  }
  std::uint64_t live = 0;
  for (const auto& [id, bytes] : expected) live += bytes.size();
  EXPECT_EQ(store->counters().live_blocks, expected.size());
  EXPECT_EQ(store->counters().live_bytes, live);
  while (!expected.empty()) {
    const auto last = std::prev(expected.end());
    insist([&] { ASSERT_EQ(read(*store, last->first, last->second.size()), last->second) << "seed " << seed; });
    store->drop(last->first);
    expected.erase(last);
    if (::testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(store->counters().live_blocks, 0U);
}

TEST(ActivationStore, HasWhatWasPutWhateverTheOrder) {
  for (const int slots : {2, 3, 16}) compare_with_map(options_of(slots), 5U + static_cast<unsigned>(slots), 300);
  ActivationStoreOptions other = options_of(4);
  other.access = FileAccess::kBuffered;
  other.io.engine = IoEngineKind::kAuto;
  other.prefetch = 0;
  compare_with_map(other, 41, 300);
}

TEST(LongActivationStore, HasWhatWasPutWhateverTheOrder) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    ActivationStoreOptions options = options_of(2 + static_cast<int>(seed % 7));
    options.prefetch = static_cast<int>(seed % 4);
    if (seed % 3 == 0) options.io.engine = IoEngineKind::kAuto;
    compare_with_map(options, seed, 1500);
  }
}

TEST(ActivationStore, LosesNothingWhenTransfersFail) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    const auto faults =
        std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kErrno, .probability = 0.05},
                                                        {.kind = IoFaultKind::kShort, .probability = 0.1},
                                                        {.kind = IoFaultKind::kRefuse, .probability = 0.05}},
                                   seed);
    compare_with_map(options_of(3, faults), seed, 300);
    EXPECT_GT(faults->count(IoFaultKind::kErrno), 0U);
  }
}

TEST(ActivationStore, AFlippedBitIsAnErrorAndNeverANumber) {
  const auto faults =
      std::make_shared<IoFaults>(std::vector<IoFault>{{.kind = IoFaultKind::kFlip, .probability = 1.0}}, 3);
  const auto store = ActivationStore::open(options_of(2, faults));
  std::vector<ActivationStore::Id> ids;
  for (unsigned block = 0; block < 4; ++block) ids.push_back(store->put(bytes_of(8000, block), "input of unit 3"));
  EXPECT_THAT(
      test::error_of(ErrorCode::kIo, [&] { (void)read(*store, ids[0], 8000); }),
      AllOf(HasSubstr("an activation that was read is not the one that was written"),
            HasSubstr("input of unit 3, byte 0 of it"), HasSubstr("8000 bytes"), HasSubstr("look at its health")));
}

/// Puts blocks of two pieces, and reads them in the reverse order.
ActivationCounters there_and_back(ActivationStoreOptions options, unsigned blocks, std::size_t bytes) {
  const auto store = ActivationStore::open(options);
  std::vector<ActivationStore::Id> ids;
  for (unsigned block = 0; block < blocks; ++block) ids.push_back(store->put(bytes_of(bytes, block), "x"));
  for (unsigned block = blocks; block-- > 0;) {
    EXPECT_EQ(read(*store, ids[block], bytes), bytes_of(bytes, block));
    store->drop(ids[block]);
  }
  return store->counters();
}

TEST(ActivationStore, ReadsAheadInTheReverseOrder) {
  constexpr unsigned kBlocks = 12;
  constexpr std::size_t kBytes = 12'000;  // two pieces
  // A write that is still on its way keeps its slot, which then cannot be read to: on a slow disk once more.
  ActivationCounters counters;
  for (int attempt = 0; attempt < 20; ++attempt) {
    counters = there_and_back(options_of(8), kBlocks, kBytes);
    EXPECT_EQ(counters.write_bytes, kBlocks * (8192U + 4096U));
    EXPECT_EQ(counters.peak_live_bytes, kBlocks * kBytes);
    EXPECT_EQ(counters.live_blocks, 0U);
    if (counters.on_demand == 0) break;
  }
  EXPECT_EQ(counters.on_demand, 0U) << "the last blocks are in slots, and each read asks for those before it";
  EXPECT_LE(counters.read_bytes, (kBlocks - 3) * (8192U + 4096U)) << "what slots still have is not read";
  EXPECT_GE(counters.read_bytes, (kBlocks - 4) * (8192U + 4096U));

  ActivationStoreOptions alone = options_of(2);
  alone.prefetch = 0;
  EXPECT_EQ(there_and_back(alone, kBlocks, kBytes).on_demand, kBlocks - 1U)
      << "without reading ahead each block but the last is waited for";
}

TEST(ActivationStore, UsesPlaceAndMemoryAgain) {
  const ActivationStoreOptions options = options_of(4);
  const auto store = ActivationStore::open(options);
  EXPECT_EQ(ActivationStore::memory_bytes(options), 4U * 8192);
  EXPECT_EQ(store->file_bytes(), 0U) << "files come with the first block";
  std::uint64_t first = 0;
  for (int step = 0; step < 5; ++step) {
    std::vector<ActivationStore::Id> ids;
    for (unsigned block = 0; block < 20; ++block) ids.push_back(store->put(bytes_of(10'000, block), "x"));
    for (const ActivationStore::Id id : ids) store->drop(id);  // not read: a loss that was thrown away
    if (step == 0) first = store->file_bytes();
  }
  EXPECT_EQ(store->counters().live_bytes, 0U);
  // Places of writes that were on their way when their block was dropped are free a little later.
  EXPECT_LE(store->file_bytes(), first + options.segment_bytes);
  EXPECT_GE(store->measured_file_bytes(), store->file_bytes());
}

TEST(ActivationStore, TakesBlocksLargerThanItsFilesAndItsMemory) {
  const auto store = ActivationStore::open(options_of(2));
  const Bytes large = bytes_of(200'001, 7);
  const ActivationStore::Id id = store->put(large, "x");
  EXPECT_EQ(read(*store, id, large.size()), large);
  EXPECT_EQ(read(*store, id, large.size()), large) << "a block may be read again";
}

TEST(ActivationStore, SaysWhatIsWrong) {
  ActivationStoreOptions options = options_of(4);
  options.folders = {};
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)ActivationStore::open(options); }), HasSubstr("no folder"));
  options = options_of(1);
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)ActivationStore::open(options); }),
              HasSubstr("2 slots or more"));
  options = options_of(4);
  options.piece_bytes = 1000;
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)ActivationStore::open(options); }),
              HasSubstr("multiples of 4096"));
  const auto store = ActivationStore::open(options_of(4));
  const ActivationStore::Id id = store->put(bytes_of(100, 1), "input of unit 3");
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)read(*store, id, 99); }),
              AllOf(HasSubstr("another length"), HasSubstr("input of unit 3")));
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)store->put({}, "x"); }), HasSubstr("is empty"));
  store->drop(id);
  store->drop(id);
  EXPECT_THAT(test::error_of(ErrorCode::kUsage, [&] { (void)read(*store, id, 100); }), HasSubstr("not there"));
}

TEST(ActivationStore, ThreadsTakeTurns) {
  const auto store = ActivationStore::open(options_of(3));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (unsigned round = 0; round < 40; ++round) {
        const Bytes bytes = bytes_of(1 + (round * 977) % 20'000, 100 * thread + round);
        const ActivationStore::Id id = store->put(bytes, "x");
        wrong += read(*store, id, bytes.size()) == bytes ? 0 : 1;
        store->drop(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(store->counters().live_blocks, 0U);
}

TEST(FileSpace, JoinsFreeNeighbours) {
  offload::FileSpace space({std::filesystem::temp_directory_path().string()}, {}, 40'960);
  std::vector<offload::Extent> taken;
  for (int block = 0; block < 10; ++block) taken.push_back(space.take(4096));
  EXPECT_EQ(space.num_files(), 1U);
  EXPECT_EQ(space.free_bytes(), 0U);
  for (const std::size_t block : {1U, 3U, 2U}) space.give_back(taken[block]);
  EXPECT_EQ(space.take(12'288).offset, 4096U) << "three neighbours are one range";
  EXPECT_EQ(space.num_files(), 1U);
  EXPECT_EQ(space.take(50'000 / 4096 * 4096).file, 1U) << "what fits nowhere makes a file";
}

}  // namespace
}  // namespace zeroth
