#include "support/error_of.h"

#include <zeroth/comm/flight_recorder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

namespace zeroth {
namespace {

using ::testing::HasSubstr;

CallRecord a_call(std::uint64_t sequence) {
  return {.sequence = sequence,
          .elements = 100,
          .group = 0,
          .unit = 3,
          .label = 9,
          .kind = CollectiveKind::kReduceScatter,
          .dtype = DType::kBFloat16};
}

std::vector<nlohmann::json> lines_of(const FlightRecorder& recorder) {
  const std::string path = testing::TempDir() + "/flight-recorder-test.jsonl";
  recorder.write(path, 1, 4);
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  std::filesystem::remove(path);
  return lines;
}

TEST(FlightRecorder, KeepsWhatACallWasAndWhenItEnded) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.group("world"), 0);
  EXPECT_EQ(recorder.group("world/dp"), 1);
  EXPECT_EQ(recorder.group("world"), 0);
  EXPECT_EQ(recorder.last_call(), "");
  const std::uint64_t ticket = recorder.begin(a_call(40));
  EXPECT_THAT(recorder.last_call(), HasSubstr("reduce_scatter#40 of world, begun 0.0 s ago"));
  CallRecord open = recorder.records().at(0);
  EXPECT_EQ(open.ended_ns, 0);
  recorder.end(ticket);
  EXPECT_THAT(recorder.last_call(), HasSubstr("ended"));
  const CallRecord done = recorder.records().at(0);
  EXPECT_GE(done.ended_ns, done.begun_ns);
  open.ended_ns = done.ended_ns;
  EXPECT_EQ(open, done);
  EXPECT_EQ(done.unit, 3);
  EXPECT_EQ(done.kind, CollectiveKind::kReduceScatter);
  EXPECT_EQ(done.dtype, DType::kBFloat16);
}

TEST(FlightRecorder, KeepsNamesOfBarriers) {
  FlightRecorder recorder;
  EXPECT_EQ(recorder.group("world"), 0);
  const std::int32_t name = recorder.name("before the export");
  EXPECT_EQ(recorder.name("before the export"), name);
  recorder.end(recorder.begin({.sequence = 7, .name = name}));
  EXPECT_THAT(recorder.last_call(), HasSubstr("barrier#7 \"before the export\" of world, ended"));
  EXPECT_EQ(recorder.names().at(static_cast<std::size_t>(recorder.records().at(0).name)), "before the export");
  for (int number = 0; number < 3'000; ++number)
    (void)recorder.name("step " + std::to_string(number));  // a name a step does not fill the memory
  EXPECT_EQ(recorder.names().size(), 1'024U);
  EXPECT_EQ(recorder.names().at(static_cast<std::size_t>(recorder.name("one more"))), "...");
  EXPECT_EQ(lines_of(recorder).at(1).at("name"), "before the export");
}

TEST(FlightRecorder, SaysWhatCallsAndWaitsWereAbout) {
  FlightRecorder recorder;
  (void)recorder.group("world");
  CallRecord call = a_call(4);
  call.about = recorder.name("the gradients of unit blocks.1");
  recorder.end(recorder.begin(call));
  EXPECT_THAT(recorder.last_call(), HasSubstr("reduce_scatter#4 (the gradients of unit blocks.1) of world, ended"));
  (void)recorder.begin({.sequence = 2, .about = recorder.name("parameters of unit root"), .wait = true});
  EXPECT_THAT(recorder.last_call(), HasSubstr("wait#2 (parameters of unit root) of world, begun"));
  EXPECT_TRUE(recorder.records().at(1).wait);
  EXPECT_EQ(recorder.records().at(0).about, call.about);
  EXPECT_EQ(recorder.records().at(0).name, -1);
  const std::vector<nlohmann::json> lines = lines_of(recorder);
  EXPECT_EQ(lines.at(0).at("names"),
            (std::vector<std::string>{"the gradients of unit blocks.1", "parameters of unit root"}));
  EXPECT_EQ(lines.at(1).at("about"), 0);
  EXPECT_EQ(lines.at(2).at("about"), 1);
  EXPECT_EQ(lines.at(2).at("call"), "wait");
}

TEST(FlightRecorder, KeepsTheLast) {
  FlightRecorder recorder;
  const std::uint64_t first = recorder.begin(a_call(0));
  for (std::uint64_t call = 1; call < 3 * FlightRecorder::kRecords; ++call) recorder.end(recorder.begin(a_call(call)));
  recorder.end(first);  // long gone: must not mark another call
  const std::vector<CallRecord> records = recorder.records();
  ASSERT_EQ(records.size(), FlightRecorder::kRecords);
  for (std::size_t index = 0; index < records.size(); ++index)
    EXPECT_EQ(records[index].sequence, 2 * FlightRecorder::kRecords + index);
}

TEST(FlightRecorder, AReaderSeesWholeRecords) {
  FlightRecorder recorder;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (std::uint64_t call = 0; !stop.load(); ++call) {
      CallRecord record = a_call(call);
      record.elements = static_cast<std::int64_t>(call) * 3;
      record.label = static_cast<std::uint32_t>(call);
      recorder.end(recorder.begin(record));
    }
  });
  for (int round = 0; round < 200; ++round) {
    for (const CallRecord& record : recorder.records()) {
      ASSERT_EQ(record.elements, static_cast<std::int64_t>(record.sequence) * 3);
      ASSERT_EQ(record.label, static_cast<std::uint32_t>(record.sequence));
    }
  }
  stop.store(true);
  writer.join();
}

TEST(FlightRecorder, WritesOneObjectALine) {
  FlightRecorder recorder;
  (void)recorder.group("world");
  recorder.end(recorder.begin(a_call(1)));
  (void)recorder.begin(a_call(2));
  const std::vector<nlohmann::json> lines = lines_of(recorder);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0].at("rank"), 1);
  EXPECT_EQ(lines[0].at("size"), 4);
  EXPECT_EQ(lines[1].at("call"), "reduce_scatter");
  EXPECT_EQ(lines[1].at("group"), "world");
  EXPECT_EQ(lines[2].at("ended_ns"), 0);
  EXPECT_THAT(test::error_of(ErrorCode::kIo, [&] { recorder.write("/nonexistent/folder/trace", 1, 4); }),
              HasSubstr("/nonexistent/folder/trace"));
}

TEST(FlightRecorder, AFileIsItsOwnersAloneAndReplacesOnlyAPlainOne) {
  const FlightRecorder recorder;
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "flight-recorder-files";
  std::filesystem::create_directory(folder);
  const std::string path = folder / "trace";
  std::ofstream(path) << "of an earlier run\n";
  std::filesystem::permissions(path, std::filesystem::perms::all);
  recorder.write(path, 1, 4, {{"code", "TIMEOUT"}});
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  std::string head;
  std::getline(std::ifstream(path), head);
  EXPECT_EQ(nlohmann::json::parse(head).at("failure").at("code"), "TIMEOUT");
  const std::string link = folder / "link";
  std::filesystem::create_symlink("/dev/full", link);
  EXPECT_THAT(test::error_of(ErrorCode::kIo, [&] { recorder.write(link, 1, 4); }), HasSubstr("File exists"));
  std::filesystem::remove_all(folder);
}

TEST(FlightRecorder, AFullDiskLeavesNoHalfOfAFile) {
  const FlightRecorder recorder;
  const std::string path = testing::TempDir() + "/flight-recorder-full";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit full{.rlim_cur = 16, .rlim_max = before.rlim_max};
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  const std::string text = test::error_of(ErrorCode::kIo, [&] { recorder.write(path, 1, 4); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
  EXPECT_THAT(text, HasSubstr("the trace could not be written: File too large"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace zeroth
