// What goes wrong with sends and receives that were started: the errors of blocking ones. Ranks that die, freeze, abort
// or never come are rows of faults_test.cpp.
#include "conformance/world_runner.h"
#include "support/sanitizer.h"

#include <zeroth/base/error.h>
#include <zeroth/base/failpoint.h>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;
using Pending = std::unique_ptr<PendingPoints>;

[[nodiscard]] std::vector<WorldParam> worlds_that_compare() {
  std::vector<WorldParam> worlds = several_matched_ranks();
  if (started_worlds().empty()) worlds.insert(worlds.end(), {{"staged", 2}, {"mixed", 3}});
  std::erase_if(worlds, [](const WorldParam& world) { return !compares_messages(world); });
  return worlds;
}

class StartedMismatch : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedMismatch, ::testing::ValuesIn(worlds_that_compare()), name_of_param);

class StartedFaults : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedFaults, ::testing::ValuesIn(one_world_a_backend(worlds_that_compare())),
                         name_of_param);

/// A rank that sees nothing gives up soon.
[[nodiscard]] WorldOptions impatient(Milliseconds timeout) {
  WorldOptions options{.abort_on_failure = false};
  options.comm.timeout = timeout;
  return options;
}

/// Asks, until the end of `patience`.
void poll(PendingPoints& pending, Milliseconds patience = quick_options().timeout) {
  for (const Deadline deadline(patience); !pending.done(); std::this_thread::sleep_for(Milliseconds{1}))
    require(!deadline.passed(), "it was never done, and said nothing");
}

/// What rank 1 receives where rank 0 sends 50'000 floats with unit 1.
struct Case {
  const char* name;
  std::size_t count;
  MessageTag tag;
  bool integers;
  std::vector<std::string> both_sides;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"OtherSize", 50'001, {.unit = 1}, false, {"send#0 float32, 50000 elements", "recv#0 float32, 50001 elements"}},
      {"OtherTag", 50'000, {.unit = 2}, false, {"to rank 1, unit 1", "from rank 0, unit 2"}},
      {"OtherDtype", 50'000, {.unit = 1}, true, {"send#0 float32", "recv#0 int32"}}};
  return all;
}

/// Found by whoever asks, whoever waits, and in whatever call the receiver is.
void expect_mismatch(const WorldParam& world, const Case& item, bool in_another_call) {
  SCOPED_TRACE(fmt::format("{} {}", item.name, in_another_call));
  const bool messages = over_messages(world);
  const RankReport report = run_world(
      world,
      [&](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        std::vector<float> data(item.count);
        std::vector<std::int32_t> integers(item.count);
        if (rank == 0) {
          const Pending pending = comm.start_send(std::span<const float>(data).first(50'000), 1, {.unit = 1});
          if (!messages) poll(*pending);
          pending->wait();
        }
        if (rank == 1) {
          const Pending pending = item.integers ? comm.start_recv(std::span(integers), 0, item.tag)
                                                : comm.start_recv(std::span(data), 0, item.tag);
          if (in_another_call) comm.recv(std::span(data), comm.size() == 2 ? 0 : 2, {.unit = 7});
          poll(*pending);
        }
        if (rank == 2 && in_another_call) comm.recv(std::span(data), 1);  // is there until the error
      },
      impatient(messages ? Milliseconds{1'000} : quick_options().timeout));
  std::set<int> who;
  for (const RankFailure& failure : report.failures) {
    if (failure.rank > 1) continue;  // hears of it, too, where it still is in a call
    who.insert(failure.rank);
    if (failure.rank == 0 && (messages || tells_others(world))) continue;
    EXPECT_EQ(failure.code, ErrorCode::kMismatch) << failure.text;
    for (const std::string& side : item.both_sides) EXPECT_THAT(failure.text, HasSubstr(side));
  }
  EXPECT_EQ(who, (std::set{0, 1})) << report.text();
}

TEST_P(StartedMismatch, AnotherMessageThanExpectedIsNamedOnBothSides) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  for (std::size_t index = 0; index < cases().size(); ++index) expect_mismatch(GetParam(), cases()[index], index == 1);
}

/// The receiver refuses the message and leaves between two looks of the sender.
TEST_P(StartedMismatch, IsNotTheLossOfAReceiverThatHasLeft) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  arm_failpoints(parse_failpoints("shm.look:sleep=60"), 0);
  expect_mismatch(GetParam(), cases().front(), false);
  disarm_failpoints();
}

TEST_P(StartedFaults, AWaitEndsAtTheDeadlineAndSaysHowFarItCame) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        if (rank != 0) return std::this_thread::sleep_for(Milliseconds{1'200});
        const std::vector<float> data(50'000);
        const Pending pending = comm.start_send(std::span<const float>(data), 1, {.unit = 2});
        for (const Deadline asks(Milliseconds{450}); !asks.passed(); std::this_thread::sleep_for(Milliseconds{1}))
          require(!pending->done(), "nobody has taken it");  // and this has no deadline
        pending->wait();
      },
      impatient(Milliseconds{300}));
  ASSERT_EQ(report.failures.size(), 1U) << report.text();
  const RankFailure& failure = report.failures.front();
  EXPECT_EQ(failure.code, ErrorCode::kTimeout) << failure.text;
  EXPECT_THAT(failure.text, HasSubstr("send#0 float32, 50000 elements (200000 B) to rank 1, unit 2, label 0"));
  if (!over_messages(GetParam())) {
    EXPECT_THAT(failure.text, HasSubstr("of 200000 B sent"));
  }
}

/// Where a rank that leaves or stops the job is heard of: these tests' messages do not tell.
class StartedLosses : public ::testing::TestWithParam<WorldParam> {};
INSTANTIATE_TEST_SUITE_P(Backends, StartedLosses, ::testing::ValuesIn([] {
                           std::vector<WorldParam> worlds = one_world_a_backend(worlds_that_compare());
                           std::erase_if(worlds, over_messages);
                           return worlds;
                         }()),
                         name_of_param);

/// Who only asks does not wait for the end of its patience.
TEST_P(StartedLosses, WhoAsksHearsOfARankThatLeavesOrStopsTheJob) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  for (const bool aborts : {false, true}) {
    const RankReport report = run_world(
        GetParam(),
        [&](int rank, const std::shared_ptr<CommBackend>& backend) {
          const Communicator comm(backend);
          comm.barrier();
          if (rank == 1 && aborts) backend->abort(Error(ErrorCode::kNonFinite, "the loss is gone"));
          if (rank != 0) return;
          std::vector<float> data(100'000);
          const Pending pending =
              aborts ? comm.start_recv(std::span(data), 1) : comm.start_send(std::span<const float>(data), 1);
          poll(*pending, Milliseconds{5'000});
        },
        impatient(quick_options().timeout));
    ASSERT_EQ(report.failures.size(), 1U) << report.text();
    const RankFailure& failure = report.failures.front();
    EXPECT_EQ(failure.code, aborts ? ErrorCode::kAborted : ErrorCode::kPeerLost) << failure.text;
    EXPECT_THAT(failure.text, HasSubstr("rank 1"));
    EXPECT_THAT(failure.text, HasSubstr(aborts ? "the loss is gone" : "left early"));
    EXPECT_THAT(failure.text, HasSubstr(aborts ? "recv#0" : "send#0"));
  }
}

/// After an error every later call has it, also one for messages that were started before.
TEST_P(StartedFaults, AnErrorOfOneIsTheErrorOfAll) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        if (rank != 0) return std::this_thread::sleep_for(Milliseconds{900});
        std::vector<float> data(9);
        const Pending first = comm.start_recv(std::span(data).first(4), 1, {.unit = 1});
        const Pending second = comm.start_recv(std::span(data).last(5), 1, {.unit = 2});
        std::set<std::string> texts;
        const auto fails = [&](const auto& call) {
          try {
            call();
          } catch (const Error& error) {
            texts.insert(error.what());
            return;
          }
          require(false, "a call of a broken group succeeded");
        };
        fails([&] { first->wait(); });
        fails([&] { second->wait(); });
        fails([&] { (void)second->done(); });
        fails([&] { (void)comm.start_send(std::span<const float>(data), 1); });
        fails([&] { comm.send(std::span<const float>(data), 1); });
        require(texts.size() == 1, *texts.begin() + " and " + *texts.rbegin());
      },
      impatient(Milliseconds{250}));
  EXPECT_TRUE(report.ok()) << report.text();
}

/// An exception ends what a rank was doing, and its memory gets other content: no rank takes that for a message.
TEST_P(StartedFaults, MessagesThatAreGivenUpBreakTheGroupAndNobodysData) {
  ZR_SKIP_UNDER_TSAN(GetParam());
  const RankReport report = run_world(
      GetParam(),
      [](int rank, const std::shared_ptr<CommBackend>& backend) {
        const Communicator comm(backend);
        if (rank == 0) {
          std::vector<float> data(300'000, 1.0F);
          try {
            const Pending first = comm.start_send(std::span<const float>(data), 1);
            const Pending second = comm.start_send(std::span<const float>(data), 1);  // goes first
            const Pending other = comm.start_recv(std::span(data), 1);
            throw std::runtime_error("the forward failed");
          } catch (const std::runtime_error&) {
            std::ranges::fill(data, 2.0F);
          }
          std::this_thread::sleep_for(Milliseconds{50});
          try {
            comm.send(std::span<const float>(data), 1);
            require(false, "the group works");
          } catch (const Error& error) {
            require(error.code() == ErrorCode::kUsage, error.what());
            require(std::string(error.what()).find("given up") != std::string::npos, error.what());
          }
          std::this_thread::sleep_for(Milliseconds{400});
        }
        if (rank == 1) {
          std::this_thread::sleep_for(Milliseconds{20});
          std::vector<float> data(300'000);
          for (int message = 0; message < 2; ++message) {
            comm.start_recv(std::span(data), 0)->wait();
            require(std::ranges::count(data, 1.0F) == 300'000, "it took something else for the message");
          }
        }
      },
      impatient(Milliseconds{1'000}));
  for (const RankFailure& failure : report.failures) {
    EXPECT_EQ(failure.rank, 1) << failure.text;
    const std::set<std::optional<ErrorCode>> ends{ErrorCode::kPeerLost, ErrorCode::kTimeout, ErrorCode::kAborted};
    EXPECT_TRUE(ends.contains(failure.code)) << failure.text;
  }
}

}  // namespace
}  // namespace zeroth::test
