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
      {64, 0, "", FailureClass::kOwnFault},
      {65, 0, "", FailureClass::kOwnFault},
      {69, 0, "", FailureClass::kOwnFault},
      {70, 0, "", FailureClass::kOwnFault},
      {71, 0, "", FailureClass::kOwnFault},
      {74, 0, "", FailureClass::kOwnFault},
      {77, 0, "", FailureClass::kOwnFault},
      {0, SIGKILL, "", FailureClass::kSignal},
      {0, SIGSEGV, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kSignal},
      {76, 0, "", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [MISMATCH] x", FailureClass::kMismatch},
      {76, 0, "ZEROTH ERROR [TIMEOUT] x", FailureClass::kTimeout},
      {76, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [ABORTED] x", FailureClass::kAborted},
      {76, 0, "ZEROTH ERROR [CONFIG] x", FailureClass::kPeerLost},
      {76, 0, "ZEROTH ERROR [MISMATCH", FailureClass::kPeerLost},
      // Exit codes of the program's own say nothing; the line tells what it was.
      {1, 0, "", FailureClass::kUnexplained},
      {2, 0, "", FailureClass::kUnexplained},
      {255, 0, "", FailureClass::kUnexplained},
      {1, 0, "ZEROTH ERROR [NOBODY KNOWS] x", FailureClass::kUnexplained},
      {1, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kPeerLost},
      {2, 0, "ZEROTH ERROR [ABORTED] x", FailureClass::kAborted},
      {1, 0, "RuntimeError: [PEER_LOST] x", FailureClass::kPeerLost},
      {1, 0, "zeroth.ConfigError: [CONFIG] x", FailureClass::kOwnFault},
      {1, 0, "ZEROTH ERROR [USER] x", FailureClass::kOwnFault},
      {1, 0, "ValueError: [1, 2] x", FailureClass::kUnexplained},
      {1, 0, "ZEROTH ERROR [CONFIG] x", FailureClass::kOwnFault},
      // abort() is where an uncaught C++ exception ends, also one that tells of a lost peer.
      {0, SIGABRT, "", FailureClass::kUnexplained},
      {0, SIGABRT, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kPeerLost},
      {0, SIGABRT, "ZEROTH ERROR [OUT_OF_MEMORY] x", FailureClass::kOwnFault},
      // A caught error of the past says nothing about an end of another kind.
      {78, 0, "ZEROTH ERROR [PEER_LOST] x", FailureClass::kOwnFault},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(classify(at(0, 0, row.exit_code, row.signal, row.line)), row.expected)
        << row.exit_code << " " << row.signal << " " << row.line;
  }
}

struct Story {
  const char* what;
  std::vector<FailureRecord> records;
  int expected_rank;
};

void expect_causes(const std::vector<Story>& stories) {
  for (const Story& story : stories) {
    EXPECT_EQ(story.records[*first_cause(story.records)].rank, story.expected_rank) << story.what;
    std::vector<FailureRecord> reversed(story.records.rbegin(), story.records.rend());
    EXPECT_EQ(reversed[*first_cause(reversed)].rank, story.expected_rank) << story.what << ", reversed";
  }
}

const std::string kPeerLost = "ZEROTH ERROR [PEER_LOST] x";
const std::string kAborted = "ZEROTH ERROR [ABORTED] x";
const std::string kMismatch = "ZEROTH ERROR [MISMATCH] x";
const std::string kTimeout = "ZEROTH ERROR [TIMEOUT] x";

TEST(FirstCause, TheFirstDeathBySignalIsTheCauseAndNotWhatFollowsFromIt) {
  expect_causes({
      {"the others catch it and return a code of their own", {at(1, 0, 0, SIGKILL), at(0, 90, 2)}, 1},
      {"seen in one look, in the order of ranks", {at(0, 0, 2), at(1, 1, 0, SIGKILL), at(2, 2, 1)}, 1},
      {"a segmentation fault, and lost peers", {at(0, 20, 76, 0, kPeerLost), at(2, 0, 0, SIGSEGV), at(1, 21, 76)}, 2},
      {"the lost peers were quicker", {at(0, 0, 76, 0, kPeerLost), at(1, 150, 0, SIGKILL)}, 1},
      {"two deaths: the first", {at(0, 60, 0, SIGSEGV), at(1, 0, 0, SIGKILL)}, 1},
      {"uncaught echoes end in abort()", {at(0, 30, 0, SIGABRT), at(1, 0, 0, SIGBUS), at(2, 40, 0, SIGABRT)}, 1},
      {"somebody runs out of memory later", {at(0, 100, 71), at(1, 0, 0, SIGKILL)}, 1},
      {"a mismatch is what it looks like to the others", {at(0, 1, 76, 0, kMismatch), at(1, 2, 0, SIGBUS)}, 1},
  });
}

TEST(FirstCause, AnOwnFaultKeepsItsMeaningWhateverElseHappens) {
  expect_causes({
      {"alone", {at(3, 5, 78)}, 3},
      {"a signal after it", {at(0, 0, 78), at(1, 50, 0, SIGSEGV)}, 0},
      {"in one look with a signal", {at(0, 0, 0, SIGTERM), at(1, 5, 78)}, 1},
      {"the others gave up before it got to its exit", {at(0, 0, 2), at(1, 120, 78)}, 1},
      {"the others ended in abort() before", {at(0, 0, 0, SIGABRT), at(1, 120, 78)}, 1},
      {"the others said so before", {at(0, 0, 76, 0, kAborted), at(1, 1, 76, 0, kMismatch), at(2, 190, 65)}, 2},
      {"exit code 1 with the line of it", {at(0, 0, 2), at(1, 60, 1, 0, "ZEROTH ERROR [CONFIG] x")}, 1},
      {"two: the first", {at(0, 90, 78), at(1, 3, 74)}, 1},
      {"two at once: the lower rank", {at(2, 3, 78), at(1, 3, 74)}, 1},
  });
}

TEST(FirstCause, AnUnexplainedEndIsTheCauseUnlessSomethingExplainsItself) {
  expect_causes({
      {"a traceback, then lost peers", {at(1, 0, 1), at(0, 40, 76, 0, kPeerLost), at(2, 41, 76)}, 1},
      {"lost peers, then the traceback", {at(0, 0, 76, 0, kPeerLost), at(1, 100, 1)}, 1},
      {"a traceback, and peers that caught what came of it", {at(1, 0, 1), at(0, 40, 2), at(2, 60, 1)}, 1},
      {"a traceback, then a death by signal", {at(1, 0, 1), at(0, 100, 0, SIGSEGV)}, 1},
      {"a traceback, then uncaught echoes", {at(1, 0, 1), at(0, 100, 0, SIGABRT)}, 1},
      {"abort() of one rank, others return a code", {at(0, 3, 2), at(1, 5, 0, SIGABRT), at(2, 90, 2)}, 1},
      {"abort() and lost peers", {at(0, 0, 76, 0, kPeerLost), at(1, 60, 0, SIGABRT)}, 1},
      {"a mismatch that one rank caught", {at(0, 3, 2), at(1, 5, 76, 0, kMismatch)}, 1},
      {"a timeout that one rank caught", {at(0, 80, 2), at(1, 0, 76, 0, kTimeout)}, 1},
      {"a traceback long before a mismatch", {at(0, 0, 1), at(1, 100, 76, 0, kMismatch)}, 0},
      {"all caught the same", {at(2, 0, 2), at(0, 20, 2), at(1, 21, 2)}, 2},
  });
}

TEST(FirstCause, AmongEchoesTheLeastIsNamed) {
  expect_causes({
      {"time, then rank", {at(2, 3, 76), at(1, 4, 76), at(0, 50, 76)}, 2},
      {"mismatch", {at(0, 1, 76, 0, kPeerLost), at(1, 99, 76, 0, kMismatch)}, 1},
      {"mismatch before timeout", {at(0, 1, 76, 0, kTimeout), at(1, 99, 76, 0, kMismatch)}, 1},
      {"peer lost before aborted", {at(0, 1, 76, 0, kAborted), at(1, 99, 76, 0, kPeerLost)}, 1},
      {"whatever their exit code", {at(0, 1, 2, 0, kAborted), at(1, 99, 76, 0, kTimeout)}, 1},
  });
  EXPECT_FALSE(first_cause({}).has_value());
}

TEST(FirstCause, DoesNotDependOnTheOrderOfTheRecords) {
  EXPECT_TRUE(rc::check([](std::vector<std::tuple<std::uint8_t, std::uint8_t, std::uint8_t>> raw) {
    const std::vector<int> codes{1, 2, 74, 76, 78};
    std::vector<FailureRecord> records;
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const auto [when, kind, text] = raw[i];
      const bool by_signal = kind % 6 == 5;
      const std::vector<std::string> lines{"", "ZEROTH ERROR [MISMATCH]", "ZEROTH ERROR [TIMEOUT]",
                                           "ZEROTH ERROR [ABORTED]"};
      records.push_back(at(static_cast<int>(i), when, by_signal ? 0 : codes[kind % 5],
                           by_signal ? (when % 3 == 0 ? SIGABRT : SIGKILL) : 0, lines[text % 4]));
    }
    RC_PRE(!records.empty());
    const int rank = records[*first_cause(records)].rank;
    std::reverse(records.begin(), records.end());
    RC_ASSERT(records[*first_cause(records)].rank == rank);
    std::rotate(records.begin(), records.begin() + static_cast<std::ptrdiff_t>(records.size() / 2), records.end());
    RC_ASSERT(records[*first_cause(records)].rank == rank);
  }));
}

TEST(FirstCause, OnlyTheOwnFaultOfARankIsFinal) {
  EXPECT_TRUE(is_final(FailureClass::kOwnFault));
  for (const FailureClass other : {FailureClass::kSignal, FailureClass::kUnexplained, FailureClass::kMismatch,
                                   FailureClass::kTimeout, FailureClass::kPeerLost, FailureClass::kAborted}) {
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

TEST(FirstCause, WhatOtherRanksSayOfOneThatHasWrittenNoError) {
  const FailureRecord killed = at(1, 0, 0, SIGKILL);
  const std::string in = ", in action 1B3 of step 4 (stage 1 of 2: the backward of chunk 1, micro-batch 3)";
  const std::string how = "zeroth.Error: [PEER_LOST] rank 1 (pid 7 on h1) was killed by SIGKILL (signal 9)";
  EXPECT_EQ(said_of(killed, how + in + "; where: comm.shm; got: rank 0 waits"), in);
  EXPECT_EQ(said_of(killed, "ZEROTH ERROR [PEER_LOST] in group world rank 1 (pid 7) was killed by SIGKILL (signal 9)" +
                                in + ": rank 2 (pid 8) exited with code 76 after it saw that; where: comm.shm"),
            in);
  EXPECT_EQ(said_of(killed, how + "; where: comm.shm"), "") << "nothing that the launcher does not know";
  EXPECT_EQ(said_of(at(2, 0, 0, SIGKILL), how + in + "; where: comm.shm"), "") << "of another rank";
  EXPECT_EQ(said_of(at(1, 0, 0, SIGSEGV), how + in + "; where: comm.shm"), "") << "of another end";
  EXPECT_EQ(said_of(at(1, 0, 3), "x.Error: [PEER_LOST] rank 1 (pid 7) exited with code 3 before the others were done" +
                                     in + "; where: comm.shm"),
            in);
  const std::string aborted =
      "zeroth.Error: [ABORTED] rank 1 stopped the job: [USER] ValueError: no; where: a.py:3 in f; who: rank 0/2";
  EXPECT_EQ(said_of(at(1, 0, 1), aborted), ": [USER] ValueError: no; where: a.py:3 in f");
  EXPECT_EQ(said_of(at(10, 0, 1), aborted), "");
  EXPECT_EQ(said_of(at(1, 0, 78, 0, "ZEROTH ERROR [CONFIG] x"), aborted), "") << "it has said so itself";
  EXPECT_EQ(said_of(killed, ""), "");
}

constexpr SteadyClock::time_point kStart{};

TEST(FirstCause, ALostHostExplainsWhatItsPeersSay) {
  const std::vector<FailureRecord> records{
      {.rank = 0, .pid = 7, .exit_code = 76, .when = kStart, .error_line = "ZEROTH ERROR [PEER_LOST] rank 2"},
      {.rank = 1,
       .pid = 8,
       .exit_code = 76,
       .when = kStart + Milliseconds(5),
       .error_line = "ZEROTH ERROR [TIMEOUT] no answer"},
      {.rank = 2,
       .exit_code = 76,
       .when = kStart + Milliseconds(9000),
       .error_line = "[PEER_LOST] no word",
       .host = "h2",
       .num_ranks = 2}};
  EXPECT_EQ(classify(records[2]), FailureClass::kHostLost);
  EXPECT_EQ(first_cause(records), 2U);
  EXPECT_EQ(describe(records[2]), "host h2 (ranks 2-3): [PEER_LOST] no word");
  EXPECT_EQ(job_exit_code(records[2]), 76);
}

TEST(FirstCause, AHostThatCouldNotStartItsRanksIsItsOwnFault) {
  const FailureRecord record{.rank = 3, .exit_code = 69, .error_line = "[LAUNCH] no", .host = "h2", .num_ranks = 1};
  EXPECT_EQ(classify(record), FailureClass::kOwnFault);
  EXPECT_EQ(describe(record), "host h2 (rank 3): [LAUNCH] no");
}

TEST(FirstCause, TheHostOfARankIsNamed) {
  EXPECT_EQ(describe({.rank = 3, .pid = 9, .exit_code = 5, .host = "h2"}), "rank 3 (pid 9 on h2) exited with code 5");
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
