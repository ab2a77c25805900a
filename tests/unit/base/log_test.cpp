#include <zeroth/base/error.h>
#include <zeroth/base/log.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <stdlib.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
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

class JsonLog : public ::testing::Test {
 protected:
  JsonLog() {
    char name[] = "/tmp/zeroth-log-XXXXXX";
    const int file = ::mkstemp(name);
    if (file >= 0) ::close(file);
    path = name;
  }
  ~JsonLog() override { std::filesystem::remove(path); }
  [[nodiscard]] std::vector<nlohmann::json> lines() const {
    std::ifstream file(path);
    std::vector<nlohmann::json> objects;
    for (std::string line; std::getline(file, line);) objects.push_back(nlohmann::json::parse(line));
    return objects;
  }
  std::string path;
};

TEST_F(JsonLog, HoldsEveryLineAndRecordWhateverTheLevel) {
  const Logger log(1, 2, LogLevel::kOff, path);
  log.debug("small \"things\"");
  log.progress("rank 0's");  // not this rank's
  log.warn("bytes \xff");
  log.record("step", {{"step", std::int64_t{3}},
                      {"norm", 0.5},
                      {"bad", std::nan("")},
                      {"committed", true},
                      {"reason", std::string_view("none")}});
  const std::vector<nlohmann::json> objects = lines();
  ASSERT_EQ(objects.size(), 3U);
  EXPECT_EQ(objects[0]["text"], "small \"things\"");
  EXPECT_EQ(objects[0]["event"], "log");
  EXPECT_EQ(objects[0]["level"], "debug");
  EXPECT_EQ(objects[1]["level"], "warning");
  EXPECT_EQ(objects[2]["event"], "step");
  EXPECT_EQ(objects[2]["step"], 3);
  EXPECT_EQ(objects[2]["norm"], 0.5);
  EXPECT_TRUE(objects[2]["bad"].is_null());
  EXPECT_EQ(objects[2]["committed"], true);
  EXPECT_EQ(objects[2]["reason"], "none");
  for (const nlohmann::json& object : objects) {
    EXPECT_EQ(object["rank"], 1);
    EXPECT_THAT(object["time"].get<std::string>(), ::testing::MatchesRegex("....-..-..T..:..:......Z"));
  }
}

TEST_F(JsonLog, RanksMayShareAFile) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([this, rank] {
      const Logger log(rank, 4, LogLevel::kOff, path);
      for (int line = 0; line < 200; ++line) log.warn(std::string(300, static_cast<char>('a' + rank)));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(lines().size(), 800U);  // each of them whole: it parses
}

TEST_F(JsonLog, OneThatCannotBeOpenedIsNamed) {
  try {
    const Logger log(0, 1, LogLevel::kInfo, path + "/not/there");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr(path + "/not/there"));
  }
}

TEST_F(JsonLog, AFullDiskEndsItWithOneLine) {
  const std::string text = captured([] {
    const Logger log(0, 1, LogLevel::kInfo, "/dev/full");
    log.record("step", {});
    log.record("step", {});
  });
  EXPECT_EQ(text, "[zeroth 0/1] warning: the JSON log /dev/full ends here: No space left on device\n");
}

}  // namespace
}  // namespace zeroth
