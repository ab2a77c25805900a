#include "doctor/schedule_command.h"
#include "doctor/schedule_options.h"
#include "doctor/schedule_report.h"
#include "support/error_of.h"

#include <zeroth/program/simulate.h>

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace zeroth::doctor {
namespace {

using test::error_of;

std::string output_of(const std::vector<const char*>& arguments) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(run_schedule_command(arguments), 0);
  std::fflush(stdout);
  return testing::internal::GetCapturedStdout();
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return std::move(text).str();
}

TEST(ScheduleCommand, PrintsProgramPictureAndTable) {
  EXPECT_EQ(output_of({"1f1b", "--stages", "2", "--micro", "2"}),
            "zeroth-program 1 schedule=1f1b ranks=2 micro_batches=2 chunks=0,1\n"
            "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP\n"
            "1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE STEP\n"
            "\n"
            "rank 0  F0 F1       B0---    B1---\n"
            "rank 1     F0 B0--- F1 B1---\n"
            "\n"
            "step 9, bubble 3: 50 % of what a rank computes\n"
            "formula: bubble 3, (p-1)(F+I+W)\n"
            "rank    computes     waits held at most  formula\n"
            "0              6         3            2        2\n"
            "1              6         0            1        1\n"
            "held: micro-batches\n"
            "link 0 to 1: 2 messages\n"
            "link 1 to 0: 2 messages\n");
}

TEST(ScheduleCommand, MessagesAndPassesHaveNoFormulaOfTheBubble) {
  EXPECT_NE(output_of({"1f1b", "--costs", "1,1,1,0.5"}).find("formula: bubble not in closed form here"),
            std::string::npos);
  EXPECT_EQ(output_of({"1f1b", "--recompute"}).find("formula"), std::string::npos);
  EXPECT_NE(output_of({"v-min", "--stages", "4"}).find("bound\n"), std::string::npos);
  EXPECT_NE(output_of({"zb-v", "--vocabulary", "1"}).find("V_SUM0"), std::string::npos);
  const std::string late = output_of({"ouroboros", "--stages", "3", "--micro", "12", "--inexact"});
  EXPECT_NE(late.find(" late=2,1,0 inexact\n"), std::string::npos);
  EXPECT_NE(late.find("\ninexact: gradients of chunks are late by steps: 2, 1, 0\n"
                      "step 48 once gradients come, of which the busiest rank computes 48; shown: 4 steps, and"),
            std::string::npos)
      << late;
  EXPECT_NE(output_of({"gpipe", "--gathers", "kept", "--offload"}).find("0UNSHARD 0F0 0SEND_F0 0FLUSH0"),
            std::string::npos);
}

TEST(ScheduleCommand, ProgramsComeBackFromTheirText) {
  const std::string file = testing::TempDir() + "zeroth_schedule_program.txt";
  const std::string text = output_of({"interleaved", "--chunks", "2", "--gathers", "kept", "--text"});
  write_file(file, text);
  EXPECT_EQ(output_of({"--program", file.c_str(), "--text"}), text);
  const std::string trace = testing::TempDir() + "zeroth_schedule_program.json";
  EXPECT_NE(output_of({"--program", file.c_str(), "--trace", trace.c_str()}).find("rank 3 "), std::string::npos);
  EXPECT_NE(text_of(trace).find("\"7B7\""), std::string::npos);
  std::remove(trace.c_str());
  std::string broken = text;
  broken.erase(broken.find(" 1SEND_B0"), 9);
  write_file(file, broken);
  EXPECT_NE(error_of(ErrorCode::kUsage, [&] { (void)run_schedule_command(std::vector{"--program", file.c_str()}); })
                .find("where: program.verify"),
            std::string::npos);
  std::remove(file.c_str());
  EXPECT_NE(
      error_of(ErrorCode::kIo, [&] { (void)run_schedule_command(std::vector{"--program", file.c_str()}); }).find(file),
      std::string::npos);
}

TEST(ScheduleCommand, ThePageHasItsPictures) {
  const std::string page = text_of(ZEROTH_DOCS "/pipeline.md");
  const auto expect_picture = [&](const std::vector<const char*>& arguments) {
    std::string picture = output_of(arguments);
    picture.erase(0, picture.find("\n\n") + 2);
    picture.erase(picture.find("\n\n") + 1);
    EXPECT_NE(page.find("```text\n" + picture + "```"), std::string::npos) << picture;
  };
  for (const char* name : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev"})
    expect_picture({name, "--stages", "3", "--micro", "6"});
  expect_picture({"1f1b", "--stages", "3", "--micro", "6", "--vocabulary", "2"});
  expect_picture({"ouroboros", "--stages", "3", "--micro", "2", "--inexact"});
  const std::string late = output_of({"ouroboros", "--stages", "2", "--micro", "2", "--inexact", "--text"});
  EXPECT_NE(page.find("```text\n" + late + "```"), std::string::npos) << late;
  EXPECT_NE(output_of({"1f1b", "--stages", "4", "--micro", "8"}).find("\nstep 33, bubble 9:"), std::string::npos);
  EXPECT_NE(page.find("| 1f1b | 33 | 9 | 4 | 48 |"), std::string::npos);
}

TEST(ScheduleCommand, WritesPictureAndTrace) {
  const std::string svg = testing::TempDir() + "zeroth_schedule.svg";
  const std::string trace = testing::TempDir() + "zeroth_schedule.json";
  (void)output_of({"zb-v", "--stages", "4", "--micro", "8", "--costs", "1,1,1,0.1", "--svg", svg.c_str(), "--trace",
                   trace.c_str()});
  EXPECT_TRUE(text_of(svg).starts_with("<svg "));
  EXPECT_TRUE(text_of(trace).starts_with("{\"displayTimeUnit\""));
  std::remove(svg.c_str());
  std::remove(trace.c_str());
  EXPECT_NE(error_of(ErrorCode::kIo, [] { write_file("none/x.svg", ""); }).find("cannot be written"),
            std::string::npos);
}

TEST(ScheduleCommand, RefusesWithOneLine) {
  struct Case {
    std::vector<const char*> arguments;
    std::string error;
  };
  for (const auto& [arguments, error] :
       std::vector<Case>{{{}, "a schedule or a program is needed"},
                         {{"1f1b", "--program", "x"}, "a schedule or a program is needed"},
                         {{"--program", "x", "--micro", "3"},
                          "a program of a file is taken as it is; where: zeroth.schedule; which: --micro"},
                         {{"1f1b", "--micro", "0"}, "which: --micro; expected: an integer from 1; got: '0'"},
                         {{"1f1b", "--micro", "2x"}, "got: '2x'"},
                         {{"1f1b", "--costs", "1,1"}, "which: --costs"},
                         {{"1f1b", "--costs", "1,1,1,1,1"}, "which: --costs"},
                         {{"1f1b", "--costs", "1,1,-1"}, "which: --costs"},
                         {{"1f1b", "--costs", "1,1,nan"}, "which: --costs"},
                         {{"1f1b", "--costs", ""}, "which: --costs"},
                         {{"1f1b", "--gathers", "all"}, "expected: none, each, kept; got: 'all'"},
                         {{"1f1b", "--vocabulary", "3"}, "expected: 1, 2; got: '3'"},
                         {{"1f1b", "--svg", ""}, "an empty file name"},
                         {{"1f1b", "--stage", "2", "--x"}, "hint: zeroth schedule --help"},
                         {{"1f1d"}, "did you mean \"1f1b\"?"}}) {
    const std::string text = error_of(ErrorCode::kUsage, [&] { (void)run_schedule_command(arguments); });
    EXPECT_NE(text.find(error), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos);
  }
}

TEST(ScheduleCommand, PrintsHelpAndNames) {
  EXPECT_NE(output_of({"--help"}).find("Usage: zeroth schedule NAME [options]"), std::string::npos);
  EXPECT_EQ(output_of({"--list"}),
            "gpipe\n1f1b\ninterleaved\nzb-h1\nzb-h2\nzb-v\nv-half\nv-min\ndualpipev\nouroboros\n");
}

}  // namespace
}  // namespace zeroth::doctor
