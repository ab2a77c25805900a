#include "doctor/options.h"

#include "doctor/pretend.h"
#include "doctor/status_lines.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace zeroth::doctor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

CommandLine parse(const std::vector<const char*>& arguments) {
  return parse_command_line(arguments);
}

TEST(Options, HaveDefaults) {
  const Options options = parse({"doctor"}).options.value();
  EXPECT_EQ(options.num_ranks, 2);
  EXPECT_EQ(options.folder, ".");
  EXPECT_EQ(options.disk_mib, 64);
  EXPECT_FALSE(options.model.has_value());
  EXPECT_TRUE(options.hosts.empty());
}

TEST(Options, AreRead) {
  const Options options = parse({"doctor",
                                 "--hosts",
                                 "a:4,b:2,[fd00::1]:2",
                                 "--exclude",
                                 "b",
                                 "--params",
                                 "7e9",
                                 "--dtype",
                                 "fp32",
                                 "--layers",
                                 "80",
                                 "--micro-steps",
                                 "4",
                                 "--compute-seconds",
                                 "0.5",
                                 "--memory-gib",
                                 "80",
                                 "--folder",
                                 "/scratch",
                                 "--disk-mib",
                                 "8",
                                 "--slow-below",
                                 "0.25",
                                 "--max-skew-ms",
                                 "100",
                                 "--min-free-gib",
                                 "2",
                                 "--timeout",
                                 "30",
                                 "--connect-timeout",
                                 "5",
                                 "--json"})
                              .options.value();
  EXPECT_THAT(options.hosts, ElementsAre(zeroth::HostEntry{"a", 4}, zeroth::HostEntry{"fd00::1", 2}));
  EXPECT_DOUBLE_EQ(options.model->params, 7e9);
  EXPECT_EQ(options.model->dtype, DType::kFloat32);
  EXPECT_EQ(options.model->layers, 80);
  EXPECT_EQ(options.model->micro_steps, 4);
  EXPECT_DOUBLE_EQ(options.compute_s, 0.5);
  EXPECT_EQ(options.memory_bytes, std::uint64_t{80} << 30U);
  EXPECT_DOUBLE_EQ(options.thresholds.slow_link, 0.25);
  EXPECT_DOUBLE_EQ(options.thresholds.skew_ms, 100);
  EXPECT_EQ(options.thresholds.free_disk_bytes, std::uint64_t{2} << 30U);
  EXPECT_EQ(options.timeout, Milliseconds{30'000});
  EXPECT_EQ(options.connect_timeout, Milliseconds{5000});
  EXPECT_TRUE(options.json);
  // What ranks must know as well.
  std::vector<const char*> again{"doctor", "--report"};
  for (const std::string& argument : options.for_ranks) again.push_back(argument.c_str());
  const Options of_rank = parse(again).options.value();
  EXPECT_TRUE(of_rank.report);
  EXPECT_EQ(of_rank.folder, "/scratch");
  EXPECT_EQ(of_rank.disk_mib, 8);
  EXPECT_EQ(of_rank.timeout, options.timeout);
  EXPECT_DOUBLE_EQ(of_rank.thresholds.slow_link, 0.25);
}

TEST(Options, TextsArePrinted) {
  EXPECT_THAT(parse({"--version"}).text, HasSubstr("zeroth 0."));
  EXPECT_THAT(parse({"--help"}).text, HasSubstr("zeroth doctor"));
  EXPECT_THAT(parse({"doctor", "--help"}).text, HasSubstr("--hostfile"));
}

TEST(Options, WhatIsWrongIsOneLine) {
  const std::vector<std::pair<std::vector<const char*>, std::string>> cases{
      {{}, "nothing to do was given"},
      {{"nurse"}, "there is no such thing to do; expected: doctor, ckpt or schedule; got: 'nurse'"},
      {{"doctor", "patient"}, "patient"},
      {{"doctor", "--nonsense"}, "--nonsense"},
      {{"doctor", "-n", "0"}, "1 to 128"},
      {{"doctor", "-n", "129"}, "1 to 128"},
      {{"doctor", "-n", "two"}, "'two'"},
      {{"doctor", "-n"}, "has no value"},
      {{"doctor", "--hosts", "a", "--hostfile", "b"}, "--hostfile and --hosts together"},
      {{"doctor", "--hosts", "a:x"}, "--hosts:1:3"},
      {{"doctor", "--hosts", ""}, "--hosts"},
      {{"doctor", "--hosts", "a", "-n", "2"}, "give slots"},
      {{"doctor", "--hosts", "a", "--exclude", "a"}, "no host is left"},
      {{"doctor", "--hosts", "a", "--ssh", ""}, "an empty value; which: --ssh"},
      {{"doctor", "--hosts", "a", "--remote-program", "a; b"}, "--remote-program"},
      {{"doctor", "--hostfile", "/nowhere/hosts"}, "/nowhere/hosts"},
      {{"doctor", "--exclude", "a"}, "this option needs hosts"},
      {{"doctor", "--connect-timeout", "5"}, "this option needs hosts"},
      {{"doctor", "--timeout", "-1"}, "--timeout"},
      {{"doctor", "--timeout", "soon"}, "--timeout"},
      {{"doctor", "--folder", ""}, "an empty folder name"},
      {{"doctor", "--disk-mib", "0"}, "1 to 1024"},
      {{"doctor", "--no-disk", "--folder", "/tmp"}, "--no-disk with a folder"},
      {{"doctor", "--slow-below", "2"}, "0.001 to 1"},
      {{"doctor", "--slow-below", "nan"}, "0.001 to 1"},
      {{"doctor", "--max-skew-ms", "-5"}, "--max-skew-ms"},
      {{"doctor", "--min-free-gib", "much"}, "--min-free-gib"},
      {{"doctor", "--params", "7"}, "--params"},
      {{"doctor", "--params", "7e9x"}, "--params"},
      {{"doctor", "--params", "7e9", "--dtype", "int8"}, "bf16, fp16, fp32 or fp64"},
      {{"doctor", "--params", "7e9", "--layers", "0"}, "--layers"},
      {{"doctor", "--params", "7e9", "--micro-steps", "0"}, "--micro-steps"},
      {{"doctor", "--params", "7e9", "--compute-seconds", "-1"}, "--compute-seconds"},
      {{"doctor", "--dtype", "bf16"}, "add --params"},
  };
  for (const auto& [arguments, words] : cases) {
    try {
      (void)parse(arguments);
      ADD_FAILURE() << "accepted: " << ::testing::PrintToString(arguments);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(words));
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("zeroth-run"), std::string::npos) << error.what();
    }
  }
}

TEST(Pretend, RulesAreReadOrRefused) {
  const Pretence pretence = parse_pretence("version=2:0.0.9;clock=1:-7000;slow=3-1:5e6;silent=0");
  EXPECT_EQ(pretence.versions.at(2), "0.0.9");
  EXPECT_DOUBLE_EQ(pretence.clocks_ms.at(1), -7000);
  EXPECT_DOUBLE_EQ(pretence.slow(1, 3), 5e6);
  EXPECT_DOUBLE_EQ(pretence.slow(3, 1), 5e6);
  EXPECT_DOUBLE_EQ(pretence.slow(0, 1), 0);
  EXPECT_TRUE(pretence.silent.contains(0));
  EXPECT_TRUE(parse_pretence("").versions.empty());
  for (const char* text : {"x", "version", "version=1", "version=a:b", "version=1:", "clock=1:soon", "slow=1:5",
                           "slow=1-1:5", "slow=1-2:-5", "slow=1-2:inf", "silent=-1", "silent=x", "other=1:2"}) {
    EXPECT_THROW((void)parse_pretence(text), Error) << text;
  }
}

TEST(StatusLines, NameThoseToLeaveOut) {
  const std::string lines =
      "{\"event\":\"host_refused\",\"host\":\"a\",\"text\":\"ssh failed\",\"late\":false}\n"
      "{\"event\":\"host_refused\",\"host\":\"b\",\"text\":\"no answer for 2 s\",\"late\":true}\n"
      "not json\n[1]\n{\"event\":\"end\",\"exit_code\":69,\"text\":\"2 of 3\"}\n";
  EXPECT_THAT(culprits_of(lines),
              ElementsAre(Culprit{"a", "ssh failed", false}, Culprit{"b", "no answer for 2 s", true}));
  EXPECT_THAT(to_leave_out(culprits_of(lines)), ElementsAre(Culprit{"a", "ssh failed", false}));
  EXPECT_THAT(to_leave_out({{"b", "late", true}}), ElementsAre(Culprit{"b", "late", true}));
  EXPECT_EQ(end_of(lines), "2 of 3");
  EXPECT_THAT(culprits_of("{\"event\":\"first_cause\",\"rank\":2,\"host\":\"b\",\"text\":\"rank 2\"}\n"),
              ElementsAre(Culprit{"b", "rank 2", false}));
  EXPECT_THAT(culprits_of("{\"event\":\"first_cause\",\"rank\":2,\"text\":\"rank 2\"}\n"), IsEmpty());
  EXPECT_THAT(culprits_of(""), IsEmpty());
}

}  // namespace
}  // namespace zeroth::doctor
