#include "doctor/report.h"

#include "doctor/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace zeroth::doctor {
namespace {

using ::testing::HasSubstr;

TEST(Report, ReadsBackWhatItWrote) {
  Report report{.num_ranks = 2};
  report.hosts = {{.host = 0, .name = "a", .address = "10.0.0.1"}};
  report.ranks = {{.rank = 0, .host_name = "a", .zeroth = "0.1.0", .devices = {"H100"}, .memlock = -1}};
  report.lost = {{.rank = 1, .host = 0, .expected = "to come", .got = "nothing"}};
  report.disks = {{.folder = "/scratch", .free = 5, .error = "full"}};
  report.clocks = {{.ahead_ms = 0.25}};
  report.links = {{.a = 0,
                   .b = 1,
                   .transport = "tcp",
                   .far = true,
                   .latency_us = 3.5,
                   .there_bytes_per_s = 1e9,
                   .back_bytes_per_s = 2e9}};
  report.findings = {
      {.code = ErrorCode::kMismatch, .message = "another Zeroth", .context = {.where = "a", .got = "\xFF\x01"}}};
  report.advice = {"plan"};
  const std::string text = to_text(report);
  EXPECT_THAT(text, HasSubstr("\"well\": false"));
  EXPECT_THAT(text, HasSubstr("\"text\": \"[MISMATCH] another Zeroth; where: a"));
  const Report again = report_from(text);
  EXPECT_EQ(again.findings.front().code, ErrorCode::kMismatch);
  EXPECT_EQ(again.links.front().back_bytes_per_s, 2e9);
  EXPECT_EQ(again.ranks.front().devices, report.ranks.front().devices);
  EXPECT_EQ(again.lost.front().got, "nothing");
  EXPECT_EQ(again.name_of_host(0), "a");
  EXPECT_EQ(again.name_of_host(7), "host 7");
  EXPECT_EQ(again.host_of(1), -1);
}

TEST(Report, RefusesWhatIsNone) {
  for (const char* text : {"", "{", "[]", "{}", "null", R"({"num_ranks": "two"})"})
    EXPECT_THROW((void)report_from(text), Error) << text;
}

TEST(Units, HaveThreeDigits) {
  EXPECT_EQ(rate_text(0), "0.00 B/s");
  EXPECT_EQ(rate_text(999), "999 B/s");
  EXPECT_EQ(rate_text(1.1e9), "1.10 GB/s");
  EXPECT_EQ(rate_text(999.6e6), "1.00 GB/s");
  EXPECT_EQ(rate_text(9.996e6), "10.0 MB/s");
  EXPECT_EQ(rate_text(5e15), "5000 TB/s");
  EXPECT_EQ(latency_text(0.44), "0.44 us");
  EXPECT_EQ(latency_text(23.14), "23.1 us");
  EXPECT_EQ(latency_text(5000), "5.00 ms");
  EXPECT_EQ(seconds_text(0.0123), "12.3 ms");
  EXPECT_EQ(seconds_text(25.4), "25.4 s");
}

}  // namespace
}  // namespace zeroth::doctor
