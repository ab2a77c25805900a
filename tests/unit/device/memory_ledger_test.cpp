#include <zeroth/device/memory.h>

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

constexpr Tag kBucketTag{0, MemoryState::kBucket};
constexpr Tag kMasterTag{1, MemoryState::kMaster};

TEST(MemoryState, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (std::size_t state = 0; state < kNumMemoryStates; ++state) {
    names.insert(name_of(static_cast<MemoryState>(state)));
  }
  EXPECT_EQ(names.size(), kNumMemoryStates);
  EXPECT_EQ(static_cast<std::size_t>(MemoryState::kOther) + 1, kNumMemoryStates);
}

TEST(MemoryLedger, CountsWhileHeld) {
  const auto ledger = MemoryLedger::create();
  {
    const MemoryHold a = ledger->hold(kBucketTag, 100);
    const MemoryHold b = ledger->hold(kMasterTag, 7);
    EXPECT_EQ(a.bytes(), 100U);
    EXPECT_EQ(ledger->live()[MemoryState::kBucket], 100U);
    EXPECT_EQ(ledger->live()[MemoryState::kMaster], 7U);
    EXPECT_EQ(ledger->live().total(), 107U);
  }
  EXPECT_EQ(ledger->live(), MemorySnapshot{});
  EXPECT_EQ(ledger->at_peak().total(), 107U);
}

TEST(MemoryLedger, PeakIsTheMomentOfTheHighestTotalNotTheSumOfPeaks) {
  const auto ledger = MemoryLedger::create();
  {
    const MemoryHold a = ledger->hold(kBucketTag, 100);
  }
  const MemoryHold b = ledger->hold(kMasterTag, 90);
  EXPECT_EQ(ledger->at_peak()[MemoryState::kBucket], 100U);
  EXPECT_EQ(ledger->at_peak()[MemoryState::kMaster], 0U);
  EXPECT_EQ(ledger->state_peaks()[MemoryState::kMaster], 90U);
  EXPECT_EQ(ledger->state_peaks().total(), 190U);
  const MemoryHold c = ledger->hold(kBucketTag, 11);
  EXPECT_EQ(ledger->at_peak().total(), 101U);
  EXPECT_EQ(ledger->at_peak()[MemoryState::kMaster], 90U);
}

TEST(MemoryLedger, ResetPeakStartsFromWhatIsLive) {
  const auto ledger = MemoryLedger::create();
  const MemoryHold keep = ledger->hold(kMasterTag, 5);
  {
    const MemoryHold gone = ledger->hold(kBucketTag, 1000);
  }
  ledger->reset_peak();
  EXPECT_EQ(ledger->at_peak(), ledger->live());
  EXPECT_EQ(ledger->state_peaks().total(), 5U);
}

TEST(MemoryHold, MovesCarryTheCount) {
  const auto ledger = MemoryLedger::create();
  MemoryHold a = ledger->hold(kBucketTag, 10);
  MemoryHold b = std::move(a);
  EXPECT_EQ(a.bytes(), 0U);  // NOLINT(bugprone-use-after-move): that is the question
  EXPECT_EQ(ledger->live().total(), 10U);
  b = ledger->hold(kMasterTag, 3);  // the first ten are given back
  EXPECT_EQ(ledger->live().total(), 3U);
  MemoryHold& same = b;
  b = std::move(same);
  EXPECT_EQ(ledger->live().total(), 3U);
  b = {};
  EXPECT_EQ(ledger->live().total(), 0U);
  EXPECT_EQ(MemoryHold().bytes(), 0U);
}

TEST(MemoryHold, OutlivesTheOwnerOfTheLedger) {
  std::optional<MemoryHold> hold;
  {
    const auto ledger = MemoryLedger::create();
    hold = ledger->hold(kBucketTag, 10);
  }
  hold.reset();  // the ledger lived on in it: AddressSanitizer would speak up
}

TEST(MemoryLedger, ThreadsDoNotLoseBytes) {
  const auto ledger = MemoryLedger::create();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&ledger, thread] {
      for (int turn = 0; turn < 500; ++turn) {
        MemoryHold a = ledger->hold({thread, MemoryState::kGathered}, 8);
        const MemoryHold b = ledger->hold({thread, MemoryState::kOverflow}, 1);
        const MemoryHold c = std::move(a);
        EXPECT_GE(ledger->live().total(), 9U);
        EXPECT_LE(ledger->at_peak().total(), 36U);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger->live(), MemorySnapshot{});
  EXPECT_GE(ledger->at_peak().total(), 9U);
}

}  // namespace
}  // namespace zeroth
