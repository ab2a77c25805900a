#include "launcher/first_cause.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

FailureRecord at(int rank, int milliseconds, int exit_code, int signal = 0, const std::string& line = "") {
  return {.rank = rank,
          .pid = 100 + rank,
          .exit_code = exit_code,
          .signal = signal,
          .when = SteadyClock::time_point{} + Milliseconds{milliseconds},
          .error_line = line};
}

TEST(FirstCause, ClassesFollowSignalCodeAndErrorLine) {
  struct Row {
    int exit_code;
    int signal;
    const char* line;
    FailureClass expected;
  };
  const std::vector<Row> rows{
      {78, 0, "", FailureClass::kOwnFault},
      {1, 0, "", FailureClass::kOwnFault},
      {71, 0, "", FailureClass::kOwnFault},
      {74, 0, "", FailureClass::kOwnFault},
      {70, 0, "", FailureClass::kOwnFault},
      {255, 0, "", FailureClass::kOwnFault},
      {0, SIGKILL, "", FailureClass::kSignal},
      {0, SIGSEGV, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kSignal},
      {76, 0, "", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [MISMATCH] x", FailureClass::kMismatch},
      {76, 0, "ZEROTH ERROR [TIMEOUT] x", FailureClass::kTimeout},
      {76, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [ABORTED] x", FailureClass::kAborted},
      {76, 0, "ZEROTH ERROR [CONFIG] x", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [MISMATCH", FailureClass::kPeerLost},
      // An uncaught Python exception always exits with 1; the line tells what it was.
      {1, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kPeerLost},
      {1, 0, "ZEROTH ERROR [CONFIG] x", FailureClass::kOwnFault},
      // A caught error of the past says nothing about an end of another kind.
      {78, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kOwnFault},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(classify(at(0, 0, row.exit_code, row.signal, row.line)), row.expected)
        << row.exit_code << " " << row.signal << " " << row.line;
  }
}

TEST(FirstCause, ClassComesBeforeTimeAndTimeBeforeRank) {
  struct Row {
    std::vector<FailureRecord> records;
    int expected_rank;
  };
  const std::vector<Row> rows{
      {{at(3, 5, 78)}, 3},
      {{at(0, 1, 76), at(1, 150, 0, SIGKILL)}, 1},
      {{at(0, 1, 76), at(1, 100, 0, SIGKILL), at(2, 190, 78)}, 2},
      {{at(0, 9, 78), at(1, 3, 1)}, 1},
      {{at(2, 3, 78), at(1, 3, 1)}, 1},
      {{at(2, 3, 76), at(1, 4, 76), at(0, 5, 76)}, 2},
      {{at(0, 1, 76, 0, "ZEROTH ERROR [PEER_LOST]"), at(1, 2, 76, 0, "ZEROTH ERROR [MISMATCH]")}, 1},
      {{at(0, 1, 76, 0, "ZEROTH ERROR [TIMEOUT]"), at(1, 2, 76, 0, "ZEROTH ERROR [MISMATCH]")}, 1},
      {{at(0, 1, 76, 0, "ZEROTH ERROR [ABORTED]"), at(1, 2, 76, 0, "ZEROTH ERROR [PEER_LOST]")}, 1},
      {{at(0, 1, 76, 0, "ZEROTH ERROR [MISMATCH]"), at(1, 2, 0, SIGBUS)}, 1},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(row.records[*first_cause(row.records)].rank, row.expected_rank);
  }
  EXPECT_FALSE(first_cause({}).has_value());
}

TEST(FirstCause, DoesNotDependOnTheOrderOfTheRecords) {
  EXPECT_TRUE(rc::check([](std::vector<std::tuple<std::uint8_t, std::uint8_t, std::uint8_t>> raw) {
    const std::vector<int> codes{1, 71, 74, 76, 78};
    std::vector<FailureRecord> records;
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const auto [when, kind, text] = raw[i];
      const bool by_signal = kind % 6 == 5;
      const std::vector<std::string> lines{
          "", "ZEROTH ERROR [MISMATCH]", "ZEROTH ERROR [TIMEOUT]", "ZEROTH ERROR [ABORTED]"};
      records.push_back(at(static_cast<int>(i),
                           when % 8,
                           by_signal ? 0 : codes[kind % 5],
                           by_signal ? 9 : 0,
                           lines[text % 4]));
    }
    RC_PRE(!records.empty());
    const int rank = records[*first_cause(records)].rank;
    std::reverse(records.begin(), records.end());
    RC_ASSERT(records[*first_cause(records)].rank == rank);
    std::rotate(
        records.begin(), records.begin() + static_cast<std::ptrdiff_t>(records.size() / 2), records.end());
    RC_ASSERT(records[*first_cause(records)].rank == rank);
  }));
}

TEST(FirstCause, OnlyTheOwnFaultOfARankIsFinal) {
  EXPECT_TRUE(is_final(FailureClass::kOwnFault));
  for (const FailureClass other : {FailureClass::kSignal,
                                   FailureClass::kMismatch,
                                   FailureClass::kTimeout,
                                   FailureClass::kPeerLost,
                                   FailureClass::kAborted}) {
    EXPECT_FALSE(is_final(other));
  }
}

TEST(FirstCause, DescribesWhatHappened) {
  EXPECT_EQ(describe(at(1, 0, 0, SIGKILL)), "rank 1 (pid 101) was killed by signal 9 (SIGKILL)");
  FailureRecord dumped = at(2, 0, 0, SIGSEGV);
  dumped.core_dumped = true;
  EXPECT_EQ(describe(dumped), "rank 2 (pid 102) was killed by signal 11 (SIGSEGV), core dumped");
  EXPECT_EQ(describe(at(1, 0, 78)), "rank 1 (pid 101) exited with code 78");
  EXPECT_EQ(describe(at(1, 0, 78, 0, "ZEROTH ERROR [CONFIG] x")),
            "rank 1 (pid 101) exited with code 78: ZEROTH ERROR [CONFIG] x");
  EXPECT_EQ(signal_name(SIGRTMIN + 3), "SIGRTMIN+3");
  EXPECT_EQ(job_exit_code(at(0, 0, 0, 9)), 137);
  EXPECT_EQ(job_exit_code(at(0, 0, 78)), 78);
}

TEST(FirstCause, CountsTheOthers) {
  EXPECT_EQ(describe_others(0, 1), "");
  EXPECT_EQ(describe_others(0, 4), "");
  EXPECT_EQ(describe_others(1, 2), "; the other rank was ended");
  EXPECT_EQ(describe_others(3, 4), "; the other 3 ranks were ended");
  EXPECT_EQ(describe_others(1, 4), "; 1 other rank was ended");
  EXPECT_EQ(describe_others(2, 4), "; 2 other ranks were ended");
}

}  // namespace
}  // namespace zeroth::launcher
