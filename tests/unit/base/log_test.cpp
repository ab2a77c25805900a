#include <zeroth/base/log.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

template <class Body>
std::string captured(const Body& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Logger, DefaultWritesNothing) {
  EXPECT_THAT(captured([] {
                const Logger log;
                log.debug("a");
                log.progress("b");
                log.warn("c");
                log.error("d");
              }),
              IsEmpty());
}

TEST(Logger, PrefixesRankAndWorld) {
  EXPECT_EQ(captured([] { Logger(3, 8).warn("low on memory"); }), "[zeroth 3/8] warning: low on memory\n");
  EXPECT_EQ(captured([] { Logger(0, 1).error("gone"); }), "[zeroth 0/1] error: gone\n");
}

TEST(Logger, OnlyRankZeroSpeaksOfProgress) {
  EXPECT_EQ(captured([] { Logger(0, 2).progress("step 1"); }), "[zeroth 0/2] info: step 1\n");
  EXPECT_THAT(captured([] { Logger(1, 2).progress("step 1"); }), IsEmpty());
}

TEST(Logger, LevelsFilter) {
  const auto all = [](LogLevel level) {
    return captured([level] {
      const Logger log(0, 1, level);
      log.debug("D");
      log.progress("I");
      log.warn("W");
      log.error("E");
    });
  };
  EXPECT_THAT(all(LogLevel::kDebug), HasSubstr("debug: D"));
  EXPECT_THAT(all(LogLevel::kInfo), Not(HasSubstr(": D")));
  EXPECT_THAT(all(LogLevel::kWarning), Not(HasSubstr(": I")));
  EXPECT_THAT(all(LogLevel::kError), Not(HasSubstr(": W")));
  EXPECT_THAT(all(LogLevel::kError), HasSubstr(": E"));
  EXPECT_THAT(all(LogLevel::kOff), IsEmpty());
}

TEST(Logger, TextIsNotAFormat) {
  EXPECT_THAT(captured([] { Logger(0, 1).warn("{} %s {0} {"); }), HasSubstr("{} %s {0} {"));
}

TEST(Logger, ManyThreadsAndCopiesKeepLinesWhole) {
  const std::string text = captured([] {
    const Logger log(1, 4);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([log] {
        for (int line = 0; line < 50; ++line) log.warn("abcdefghij");
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const std::string line = "[zeroth 1/4] warning: abcdefghij\n";
  ASSERT_EQ(text.size(), 200 * line.size());
  for (std::size_t at = 0; at < text.size(); at += line.size()) EXPECT_EQ(text.substr(at, line.size()), line);
}

TEST(Logger, TwoLoggersOfOneNameLiveSideBySide) {
  EXPECT_EQ(captured([] {
              const Logger a(0, 1);
              const Logger b(0, 1, LogLevel::kError);
              b.warn("no");
              a.warn("yes");
            }),
            "[zeroth 0/1] warning: yes\n");
}

}  // namespace
}  // namespace zeroth
