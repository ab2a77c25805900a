// What becomes of the ranks' output.
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"
#include "support/attempts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> lines_with(const std::string& text, const std::string& prefix) {
  std::vector<std::string> result;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(prefix)) result.push_back(line.substr(prefix.size()));
  }
  return result;
}

std::string all_bytes(std::size_t count) {
  std::string result;
  std::uint32_t state = 12345;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    result.push_back(static_cast<char>(state >> 24U));
  }
  return result;
}

long resident_mib(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/statm");
  long size_pages = 0;
  long resident_pages = 0;
  file >> size_pages >> resident_pages;
  return resident_pages * ::sysconf(_SC_PAGESIZE) >> 20;
}

TEST(Output, EveryLineNamesItsRankAndKeepsItsOrder) {
  constexpr int kLines = 20000;
  Job job(Job::probe(3, {"lines", std::to_string(kLines)}));
  const JobResult result = job.wait();
  ASSERT_EQ(result.exit_code, 0);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string name = std::to_string(rank);
    const auto out = lines_with(result.out, "[" + name + "] ");
    const auto err = lines_with(result.err, "[" + name + "] ");
    ASSERT_EQ(out.size(), static_cast<std::size_t>(kLines));
    ASSERT_EQ(err.size(), static_cast<std::size_t>(kLines));
    for (int i = 0; i < kLines; ++i) {
      ASSERT_EQ(out[static_cast<std::size_t>(i)], name + " out " + std::to_string(i));
      ASSERT_EQ(err[static_cast<std::size_t>(i)], name + " err " + std::to_string(i));
    }
  }
}

TEST(Output, WithoutPrefixLinesStayWhole) {
  Job job(Job::probe(3, {"lines", "5000"}, {"--no-prefix"}));
  const JobResult result = job.wait();
  for (int rank = 0; rank < 3; ++rank) {
    const auto out = lines_with(result.out, std::to_string(rank) + " out ");
    ASSERT_EQ(out.size(), 5000U);
    for (int i = 0; i < 5000; ++i) ASSERT_EQ(out[static_cast<std::size_t>(i)], std::to_string(i));
  }
}

TEST(Output, LastLineWithoutAnEndIsNotLost) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c", "printf end"});
  EXPECT_THAT(lines_with(job.wait().out, "["), ::testing::UnorderedElementsAre("0] end", "1] end"));
}

TEST(Output, ALineOfSeveralRanksIsWrittenOnce) {
  const auto run = [] {
    return Job({"-q", "-n", "3", "/bin/sh", "-c", "echo same; echo own $RANK; echo same >&2"}, {.merge = true}).wait();
  };
  const JobResult result = attempted(run, [](const JobResult& one) {  // ranks that start far apart are not waited for
    return one.out.starts_with("[ranks 0-2] same\n") && one.err == "[ranks 0-2] same\n";
  });
  EXPECT_EQ(result.out.substr(0, 17), "[ranks 0-2] same\n");
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_THAT(result.out, HasSubstr(std::string("[") + rank + "] own " + rank + "\n"));
  }
  EXPECT_EQ(result.err, "[ranks 0-2] same\n");
}

TEST(Output, AMergedLineComesBeforeTheReportOfTheEnd) {
  Job job({"-q", "-n", "2", "/bin/sh", "-c", "if [ $RANK = 0 ]; then sleep 9; fi; echo last >&2; exit 3"},
          {.merge = true});
  const JobResult result = job.wait();
  EXPECT_THAT(result.err, ::testing::StartsWith("[1] last\nzeroth-run: rank 1"));
}

TEST(Output, VeryLongLinesAreSplit) {
  constexpr std::size_t kPiece = 64 << 10;
  Job job(Job::probe(1, {"long", std::to_string(2 * kPiece + 5)}));
  const std::string piece = "[0] " + std::string(kPiece, 'x') + "\n";
  EXPECT_EQ(job.wait().out, piece + piece + "[0] xxxxx\n");
}

TEST(Output, OneRankWithoutPrefixIsCopiedByteForByte) {
  const std::string bytes = all_bytes(1000003);
  Job job({"-q", "-n", "1", "--no-prefix", "--stdin", "cat"}, {.stdin_text = bytes});
  EXPECT_EQ(job.wait().out, bytes);
}

TEST(Output, FilesHoldEachRanksBytesUnchanged) {
  const Scratch scratch;
  const std::string bytes = all_bytes(300007);
  Job job({"-q", "-n", "2", "--tee", scratch.path("a/logs"), "--stdin", "/bin/sh", "-c", "cat; echo trouble $RANK >&2"},
          {.stdin_text = bytes});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(scratch.read("a/logs/rank0.stdout.log"), bytes);
  EXPECT_EQ(scratch.read("a/logs/rank1.stdout.log"), "");
  EXPECT_EQ(scratch.read("a/logs/rank0.stderr.log"), "trouble 0\n");
  EXPECT_EQ(scratch.read("a/logs/rank1.stderr.log"), "trouble 1\n");
  EXPECT_THAT(result.err, HasSubstr("[1] trouble 1\n"));
}

TEST(Output, FilesThatCannotBeWrittenAreRefusedAtTheStart) {
  Job job(Job::probe(2, {"wait"}, {"--tee", "/dev/null/logs"}));
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 74);
  EXPECT_THAT(result.err, HasSubstr("[IO] cannot make the directory /dev/null/logs"));

  const Scratch scratch;
  scratch.file("logs/rank1.stderr.log/in_the_way", "");
  Job second(Job::probe(2, {"wait"}, {"--tee", scratch.path("logs")}));
  const JobResult refused = second.wait();
  EXPECT_EQ(refused.exit_code, 74);
  EXPECT_THAT(refused.err, HasSubstr("rank1.stderr.log"));
}

TEST(Output, AFullDiskUnderTheFilesIsSaidAndTheJobGoesOn) {
  const Scratch scratch;
  std::filesystem::create_directories(scratch.path("logs"));
  std::filesystem::create_symlink("/dev/full", scratch.path("logs/rank0.stdout.log"));
  Job job({"-q", "-n", "1", "--tee", scratch.path("logs"), "/bin/sh", "-c", "echo one; sleep 0.05; echo two"});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("[0] one\n"));
  EXPECT_THAT(result.out, HasSubstr("[0] two\n"));
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: [IO] cannot write " + scratch.path("logs/rank0.stdout.log") +
                                    ": No space left on device; this file is incomplete\n"));
}

TEST(Output, AReaderThatDoesNotReadStopsNeitherSupervisionNorSignals) {
  Job job(Job::probe(2, {"wait", "flood"}), {.read_output = false});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the pipes fill; correct at any length
  EXPECT_LT(resident_mib(job.pid()), 128) << "what nobody reads must not pile up";
  job.signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  job.start_reading();
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 143);
}

TEST(Output, CtrlCEndsEvenTheWaitForAReader) {
  Job job(Job::probe(2, {"wait", "flood"}), {.read_output = false});
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  job.signal(SIGTERM);
  // Each signal is one more step: pass on, kill, give the output up.
  JobResult result;
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    ::kill(job.pid(), SIGTERM);
  }
  result = job.wait();
  EXPECT_EQ(result.exit_code, 143);
}

TEST(Output, AReaderThatHasGoneEndsTheJob) {
  Job job(Job::probe(2, {"wait", "flood"}), {.read_output = false});
  job.close_stdout();
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGPIPE);
  EXPECT_THAT(result.err,
              HasSubstr("zeroth-run: [IO] the output cannot be written: Broken pipe; 2 ranks were ended.\n"));
}

}  // namespace
}  // namespace zeroth::test
