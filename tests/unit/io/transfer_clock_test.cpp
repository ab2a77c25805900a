// The clock of transfers: its time in flight is the union of the transfers' times, in whatever order their ends are
// told.
#include <zeroth/io/io_queue.h>
#include <zeroth/io/transfer_clock.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using std::chrono::nanoseconds;

struct Simulated {
  SteadyClock::time_point begin{std::chrono::seconds{5}};
  SteadyClock::time_point now = begin;
  TransferClock clock{[this] { return now; }};

  [[nodiscard]] SteadyClock::time_point at(int ns) const { return begin + nanoseconds{ns}; }
  void ended(int from, int to, const std::string& name = "x") {
    clock.ended(IoOp::kRead, at(from), at(to), 4096, name);
  }
};

TEST(TransferClock, CountsTheTimeInWhichAtLeastOneTransferIsOnItsWay) {
  Simulated one;
  for (const int begin : {0, 5, 30}) one.clock.began(one.at(begin));
  one.now = one.at(50);
  one.ended(5, 20);  // the second ends first
  one.ended(0, 10);
  one.ended(30, 35);
  EXPECT_EQ(one.clock.times().in_flight.count(), 25);
  one.clock.waited(one.at(8), one.at(13), "x");
  EXPECT_EQ(one.clock.times().waited.count(), 5);
  EXPECT_DOUBLE_EQ(one.clock.times().hidden_share(), 0.8);
}

TEST(TransferClock, ATransferThatIsOnItsWayCountsUntilNowAndOnce) {
  Simulated one;
  one.clock.began(one.at(0));
  one.now = one.at(10);
  EXPECT_EQ(one.clock.times().in_flight.count(), 10);
  one.now = one.at(20);
  EXPECT_EQ(one.clock.times().in_flight.count(), 20);
  one.ended(0, 15);  // seen late: it was counted until 20 already
  EXPECT_EQ(one.clock.times().in_flight.count(), 20);
  one.now = one.at(40);
  EXPECT_EQ(one.clock.times().in_flight.count(), 20) << "nothing is on its way";
}

TEST(TransferClock, NoWaitIsAllHiddenAndNothingButWaitsIsNot) {
  EXPECT_EQ(TransferTimes{}.hidden_share(), 1.0);
  EXPECT_EQ((TransferTimes{.in_flight = nanoseconds{7}, .waited = nanoseconds{7}}).hidden_share(), 0.0);
  EXPECT_EQ((TransferTimes{.in_flight = nanoseconds{7}, .waited = nanoseconds{9}}).hidden_share(), 0.0);
}

TEST(TransferClock, ThousandsOfTransfersHaveTheUnionOfTheirTimes) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    std::mt19937 random(seed);
    Simulated one;
    std::vector<std::pair<int, int>> open;  // begin and end
    std::vector<bool> covered(60'000, false);
    int now = 0;
    for (int step = 0; step < 5'000; ++step) {
      now += static_cast<int>(random() % 10);
      one.now = one.at(now);
      const int begin = now;
      const int end = begin + 1 + static_cast<int>(random() % 40);
      one.clock.began(one.now);
      open.emplace_back(begin, end);
      std::fill(covered.begin() + begin, covered.begin() + end, true);
      std::ranges::shuffle(open, random);
      std::erase_if(open, [&](const auto& transfer) {
        if (transfer.second > now) return false;
        one.ended(transfer.first, transfer.second);
        return true;
      });
    }
    one.now = one.at(now + 100);
    for (const auto& [begin, end] : open) one.ended(begin, end);
    EXPECT_EQ(one.clock.times().in_flight.count(), std::ranges::count(covered, true)) << "seed " << seed;
  }
}

TEST(TransferClock, KeepsTheLatestSpansOfTheNamesThatAQueueIsGiven) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  const auto queue = open_io_queue(folder, {.engine = IoEngineKind::kThreads});
  const auto file = ScratchFile::create(folder, 16 * 4096);
  std::vector<std::byte> memory(3 * 4096);
  auto* const block =
      reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 4095) / 4096 * 4096);
  const auto clock = std::make_shared<TransferClock>();
  const auto write = [&](const std::string& name) {
    const IoRequest request{
        .op = IoOp::kWrite, .file = file, .offset = 0, .memory = {block, 4096}, .name = name, .clock = clock};
    queue->submit({&request, 1}).wait();
  };
  write("unseen");
  EXPECT_TRUE(clock->spans().empty());
  EXPECT_GT(clock->times().in_flight.count(), 0);
  clock->keep_spans(2);
  for (const char* name : {"a", "b", "c"}) write(name);
  const std::vector<TransferSpan> spans = clock->spans();
  ASSERT_EQ(spans.size(), 2U);
  EXPECT_EQ(spans[0].name, "b");
  EXPECT_EQ(spans[1].name, "c");
  EXPECT_EQ(spans[1].bytes, 4096U);
  EXPECT_EQ(spans[1].kind, TransferSpan::Kind::kWrite);
  EXPECT_LT(spans[1].begin, spans[1].end);
  EXPECT_LE(spans[0].end, spans[1].begin);
}

}  // namespace
}  // namespace zeroth
