// zeroth-bench io: what is measured, and what is proposed from it.
#include "bench/io_choice.h"
#include "bench/io_command.h"
#include "support/error_of.h"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace zeroth::bench {
namespace {

using test::error_of;
using ::testing::HasSubstr;

TEST(ProposeIo, TheLeastMemoryWithinTheSlackIsTaken) {
  const std::vector<IoTiming> timings{{"io_uring", 1'000, 32, 2e9, 2e9},
                                      {"io_uring", 1'000, 8, 1.96e9, 1.96e9},
                                      {"aio", 4'000, 1, 1.95e9, 1.95e9},
                                      {"threads", 1'000, 4, 1.8e9, 1.8e9}};
  EXPECT_EQ(propose(timings, 0.05), timings[2]);
  EXPECT_EQ(propose(timings, 0.021), timings[1]);
  EXPECT_EQ(propose(timings, 0), timings[0]);
  EXPECT_EQ(propose(timings, 0.2), timings[2]);  // as much memory as the last one, and before it
}

TEST(ProposeIo, ReadsAndWritesCountAlike) {
  // 2 bytes take 1/1 + 1/3 s, and 1/1.8 + 1/1.8 s.
  const std::vector<IoTiming> timings{{"io_uring", 1, 1, 3, 1}, {"aio", 1, 2, 1.8, 1.8}};
  EXPECT_DOUBLE_EQ(balanced(timings[0]), 1.5);
  EXPECT_EQ(propose(timings, 0.1), timings[1]);
}

class Command : public ::testing::Test {
 protected:
  Command() {
    std::random_device random;
    folder_ = std::filesystem::temp_directory_path() / ("zeroth-bench-io-" + std::to_string(random()));
    for (const char* name : {"a", "b"}) std::filesystem::create_directories(folder_ / name);
  }
  ~Command() override { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::string folder(const char* name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

TEST_F(Command, AnEngineBlockAndDepthAreARowAndTheFilesGo) {
  const std::string first = folder("a");
  const std::string second = folder("b");
  const std::string json = folder("rows.json");
  const std::vector<const char*> arguments{first.c_str(), second.c_str(), "--engines", "threads",   "--blocks",
                                           "16KiB,64KiB", "--depths",     "1,4",       "--bytes",   "1MiB",
                                           "--seconds",   "0.001",        "--json",    json.c_str()};
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_io_command(arguments), 0);
  (void)std::fflush(stdout);
  const std::string printed = testing::internal::GetCapturedStdout();
  EXPECT_THAT(printed, HasSubstr("threads       64.0 KiB       4 "));
  EXPECT_THAT(printed, HasSubstr("proposal: threads, blocks of "));
  std::ifstream file(json);
  const auto document = nlohmann::json::parse(file);
  EXPECT_EQ(document["zeroth_io"], 1);
  EXPECT_EQ(document["folders"], (std::vector<std::string>{first, second}));
  std::vector<std::pair<std::uint64_t, int>> rows;
  for (const auto& row : document["rows"]) {
    rows.emplace_back(row["block_bytes"], row["depth"]);
    EXPECT_GT(row["read_bytes_per_s"].get<double>(), 0);
    EXPECT_GT(row["write_bytes_per_s"].get<double>(), 0);
  }
  EXPECT_EQ(rows, (std::vector<std::pair<std::uint64_t, int>>{{16'384, 1}, {16'384, 4}, {65'536, 1}, {65'536, 4}}));
  EXPECT_THAT(document["rows"], ::testing::Contains(document["proposal"]));
  EXPECT_TRUE(std::filesystem::is_empty(first) && std::filesystem::is_empty(second));
}

TEST_F(Command, WhatCannotBeMeasuredIsRefused) {
  const std::string first = folder("a");
  const auto refused = [&](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), first.c_str());
    return error_of(ErrorCode::kUsage, [&] { (void)run_io_command(arguments); });
  };
  EXPECT_THAT(refused({"--engines", "libaio"}), HasSubstr("expected: io_uring, aio, threads; got: libaio"));
  EXPECT_THAT(refused({"--blocks", "1000"}), HasSubstr("which: --blocks"));
  EXPECT_THAT(refused({"--blocks", "5000KiB,3000B"}), HasSubstr("got: 3000B"));
  EXPECT_THAT(refused({"--bytes", "2000GiB"}), HasSubstr("which: --bytes"));
  EXPECT_THAT(refused({"--bytes", "1MiB", "--blocks", "2MiB"}), HasSubstr("a block is larger than the files"));
  EXPECT_THAT(refused({"--depths", "0"}), HasSubstr("--depths"));
  EXPECT_THAT(error_of(ErrorCode::kIo,
                       [&] {
                         const std::vector<const char*> arguments{"/no/such/folder"};
                         (void)run_io_command(arguments);
                       }),
              HasSubstr("/no/such/folder"));
}

}  // namespace
}  // namespace zeroth::bench
