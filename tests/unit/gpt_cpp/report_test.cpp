#include "report.h"

#include "temp_folder.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace gpt {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::vector<json> records_of(const std::filesystem::path& path) {
  std::vector<json> records;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    records.push_back(json::parse(line));
  }
  return records;
}

TEST(Report, WritesARecordAStepAtOnceAndAFinalOne) {
  const test::TempFolder folder;
  const auto path = folder.path() / "run.jsonl";
  Report report(0, path);

  report.write(StepRecord{.step = 1, .loss = 2.5, .grad_norm = 0.75, .lr = 1e-3, .tokens = 2048, .seconds = 0.5});
  ASSERT_EQ(records_of(path).size(), 1U) << "a record must be readable while the run goes on";
  const json step = records_of(path)[0];
  EXPECT_EQ(step.at("step"), 1);
  EXPECT_EQ(step.at("loss"), 2.5);
  EXPECT_EQ(std::strtod(step.at("loss_hex").get<std::string>().c_str(), nullptr), 2.5);
  EXPECT_EQ(step.at("grad_norm"), 0.75);
  EXPECT_EQ(step.at("tokens"), 2048);
  EXPECT_EQ(step.at("seconds"), 0.5);
  EXPECT_FALSE(step.contains("skipped"));

  report.write(RunSummary{.steps = 1,
                          .validation_loss = 2.25,
                          .planned = {{"parameters", 100}},
                          .measured = {{"parameters", 100}},
                          .pss_peak = 5000,
                          .wire = {{"gather", 64}},
                          .live_slots = 3});
  const json final_record = records_of(path).at(1);
  EXPECT_EQ(final_record.at("final"), true);
  EXPECT_EQ(final_record.at("planned_bytes").at("parameters"), 100);
  EXPECT_EQ(final_record.at("measured_bytes").at("parameters"), 100);
  EXPECT_EQ(final_record.at("wire_bytes").at("gather"), 64);
  EXPECT_EQ(final_record.at("pss_peak_bytes"), 5000);
  EXPECT_EQ(final_record.at("live_slots_peak"), 3);
  EXPECT_EQ(final_record.at("validation_loss"), 2.25);
}

TEST(Report, KeepsEveryBitOfALoss) {
  const test::TempFolder folder;
  const auto path = folder.path() / "run.jsonl";
  Report report(0, path);
  const std::vector<double> losses = {std::nextafter(2.0, 3.0), 0x1.921fb54442d18p+1, 5e-324, 0.1};
  for (const double loss : losses) {
    report.write(StepRecord{.loss = loss});
  }
  const auto records = records_of(path);
  ASSERT_EQ(records.size(), losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    EXPECT_EQ(std::strtod(records[i].at("loss_hex").get<std::string>().c_str(), nullptr), losses[i]);
  }
}

TEST(Report, WritesSkippedStepsAsValidJson) {
  const test::TempFolder folder;
  const auto path = folder.path() / "run.jsonl";
  Report report(0, path);
  report.write(
      StepRecord{.step = 4, .loss = std::nan(""), .grad_norm = INFINITY, .committed = false, .reason = "non-finite"});
  const json record = records_of(path).at(0);
  EXPECT_TRUE(record.at("loss").is_null());
  EXPECT_TRUE(record.at("grad_norm").is_null());
  EXPECT_EQ(record.at("skipped"), "non-finite");
}

TEST(Report, OtherRanksWriteAndSayNothing) {
  const test::TempFolder folder;
  const auto path = folder.path() / "run.jsonl";
  ::testing::internal::CaptureStdout();
  Report report(1, path);
  report.write(StepRecord{.step = 1});
  report.progress(StepRecord{.step = 1}, 2, 10.0);
  report.validation(1, 2.0, 2.4);
  report.table(RunSummary{});
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Report, NamesAFileThatCannotBeWritten) {
  const test::TempFolder folder;
  try {
    Report report(0, folder.path() / "missing" / "run.jsonl");
    FAIL() << "nothing thrown";
  } catch (const zeroth::Error& error) {
    EXPECT_EQ(error.code(), zeroth::ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("run.jsonl"));
  }
}

TEST(Report, ShowsPlannedBesideMeasured) {
  ::testing::internal::CaptureStdout();
  Report report(0, {});
  report.table(RunSummary{.world_size = 2,
                          .zero_stage = 3,
                          .parameters = 3180800,
                          .planned = {{"parameters", 6361600}, {"optimizer", 12723200}},
                          .measured = {{"parameters", 6361600}},
                          .wire = {{"all", 1}}});
  const std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, HasSubstr("ZeRO-3, 2 ranks, 3,180,800 parameters"));
  EXPECT_THAT(text, ::testing::ContainsRegex("parameters +6,361,600 +6,361,600"));
  EXPECT_THAT(text, ::testing::ContainsRegex("optimizer +12,723,200 +-"));
}

}  // namespace
}  // namespace gpt
