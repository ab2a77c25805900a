// What zeroth-run says to bad and unusual command lines, as a user sees it.
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

struct Refusal {
  std::vector<std::string> arguments;
  int exit_code;
  std::vector<std::string> said;
};

void expect_refusal(const Refusal& refusal, const JobSetup& setup = {}) {
  SCOPED_TRACE(::testing::PrintToString(refusal.arguments));
  Job job(refusal.arguments, setup);
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, refusal.exit_code);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_THAT(result.err, ::testing::StartsWith("zeroth-run: ["));
  EXPECT_THAT(result.err, HasSubstr("; hint: "));
  for (const std::string& text : refusal.said) EXPECT_THAT(result.err, HasSubstr(text));
}

TEST(CommandLine, RefusesWhatItCannotUse) {
  const std::vector<Refusal> refusals{
      {{}, 64, {"[USAGE]", "no program", "--help"}},
      {{"true"}, 64, {"[USAGE]", "-n N", "--hostfile"}},
      {{"-n", "2"}, 64, {"[USAGE]", "no program"}},
      {{"-n", "2", "--"}, 64, {"no program"}},
      {{"-n", "2", ""}, 64, {"no program"}},
      {{"-n", "0", "true"}, 64, {"1 to 4096", "'0'"}},
      {{"-n", "-1", "true"}, 64, {"1 to 4096", "'-1'"}},
      {{"-n", "4097", "true"}, 64, {"1 to 4096", "'4097'"}},
      {{"-n", "99999999999999999999", "true"}, 64, {"1 to 4096"}},
      {{"-n", "2x", "true"}, 64, {"1 to 4096", "'2x'"}},
      {{"-n", "", "true"}, 64, {"[USAGE]"}},
      {{"-n", "2", "-n", "3", "true"}, 64, {"[USAGE]", "once"}},
      {{"-n", "2", "--tea", "d", "true"}, 64, {"--tea", "did you mean --tee?"}},
      {{"-n", "2", "--timeout", "0", "true"}, 64, {"--timeout", "'0'"}},
      {{"-n", "2", "--timeout", "soon", "true"}, 64, {"--timeout", "'soon'"}},
      {{"-n", "2", "--grace", "nan", "true"}, 64, {"--grace", "'nan'"}},
      {{"-n", "2", "--env", "1A=b", "true"}, 64, {"NAME=VALUE", "'1A=b'"}},
      {{"-n", "2", "--env", "A-B=b", "true"}, 64, {"NAME=VALUE"}},
      {{"-n", "2", "--env", "A", "true"}, 64, {"NAME=VALUE"}},
      {{"-n", "2", "--env", "=b", "true"}, 64, {"NAME=VALUE"}},
      {{"-n", "2", "--env", "WORLD_SIZE=9", "true"}, 64, {"WORLD_SIZE", "set by zeroth-run"}},
      {{"-n", "2", "line\nbreak"}, 64, {"No such file"}},
      {{"--hosts", "a:2"}, 64, {"no program"}},
      {{"--hosts", "", "true"}, 64, {"an empty value", "--hosts"}},
      {{"--hosts", "a:0", "true"}, 64, {"where: --hosts:1:3", "1 to 1024"}},
      {{"--hosts", "-oProxyCommand=x", "true"}, 64, {"--hosts:1:1", "never begins with '-'"}},
      {{"--hosts", "a,a", "true"}, 64, {"--hosts:1:3", "a host twice"}},
      {{"--hosts", "a", "--hostfile", "b", "true"}, 64, {"--hostfile and --hosts together"}},
      {{"--hosts", "a:2", "-n", "3", "true"}, 64, {"-n", "at most 2 slots"}},
      {{"--hosts", "a:1024,b:1024,c:1024,d:1024,e:1", "true"}, 64, {"at most 4097 slots, and 4096"}},
      {{"--hosts", "a:2", "-n", "0", "true"}, 64, {"1 to 4096", "'0'"}},
      {{"--hosts", "a:2", "--stdin", "true"}, 64, {"--stdin", "does not reach other hosts"}},
      {{"--hosts", "a", "--include", "b", "true"}, 64, {"--include:1:1", "not among the job's"}},
      {{"--hosts", "a", "--exclude", "a", "true"}, 64, {"no host is left"}},
      {{"--hosts", "a", "--include", "a:1", "true"}, 64, {"--include:1:3", "0 to 0"}},
      {{"--hosts", "a,b", "--include", "a", "--exclude", "b", "true"}, 64, {"together"}},
      {{"-n", "2", "--include", "a", "true"}, 64, {"--include", "add --hostfile or --hosts"}},
      {{"-n", "2", "--ssh", "rsh", "true"}, 64, {"--ssh", "needs hosts"}},
      {{"--hosts", "a", "--remote-program", "x; reboot", "true"}, 64, {"--remote-program", "'x; reboot'"}},
      {{"--hosts", "a", "--remote-program", "-x", "true"}, 64, {"--remote-program", "no '-' first"}},
      {{"--hosts", "a", "--remote-program", "", "true"}, 64, {"--remote-program"}},
      {{"--hosts", "a", "--connect-timeout", "0", "true"}, 64, {"--connect-timeout", "'0'"}},
      {{"--hosts", "a", "--lost-after", "x", "true"}, 64, {"--lost-after", "'x'"}},
      {{"--hosts", "a", "--ssh", "no-such-ssh", "true"}, 64, {"cannot start no-such-ssh"}},
      {{"--hostfile", "/no/hosts", "true"}, 74, {"[IO]", "cannot read the hostfile", "which: /no/hosts"}},
      {{"--hostfile", "/dev/null", "true"}, 78, {"[CONFIG]", "not a regular file"}},
      {{"--hostfile", "/", "true"}, 78, {"[CONFIG]", "not a regular file"}},
      {{"-n", "1", "--nnodes", "0", "true"}, 64, {"--nnodes", "1 to 4096"}},
      {{"-n", "1", "--nnodes", "2", "true"}, 64, {"missing beside --nnodes", "--node-rank"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "true"}, 64, {"missing beside --nnodes", "--rdzv"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1", "true"}, 64, {"--node-rank", "0 to 1", "'2'"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "a", "true"},
       64,
       {"--rdzv:1:2", "the port is missing"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "a:0", "true"}, 64, {"--rdzv:1:3", "1 to 65535"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "a:65536", "true"}, 64, {"--rdzv:1:3", "'65536'"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "::1:80", "true"}, 64, {"--rdzv:1:1", "not a host"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "-a:1", "true"}, 64, {"never begins with '-'"}},
      {{"--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1", "true"}, 64, {"-n N"}},
      {{"-n", "1", "--node-rank", "0", "true"}, 64, {"--node-rank", "add --nnodes"}},
      {{"-n", "1", "--rdzv-secret-file", "x", "true"}, 64, {"--rdzv-secret-file", "add --nnodes"}},
      {{"-n", "1", "--nnodes", "2", "--hosts", "a", "true"}, 64, {"--nnodes with --hostfile or --hosts"}},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "1", "--rdzv", "a:1", "--stdin", "true"},
       64,
       {"rank 0 is on node 0"}},
      {{"-n", "1", "--bind-cores", "yes", "true"}, 64, {"--bind-cores", "auto, on or off", "'yes'"}},
      {{"-n", "4096", "--bind-cores", "on", "true"}, 64, {"no core for every rank", "at least 4096"}},
      {{"-n", "1", "--max-restarts", "-1", "true"}, 64, {"--max-restarts", "0 to 1000", "'-1'"}},
      {{"-n", "1", "--max-restarts", "1001", "true"}, 64, {"--max-restarts", "'1001'"}},
      {{"-n", "1", "--json", "", "true"}, 64, {"--json", "empty"}},
      {{"-n", "1", "--dry-run", "/no/such"}, 64, {"cannot start /no/such"}},
      {{"-n", "1", "-m"}, 64, {"no module"}},
      {{"-n", "1", "--nproc_per_node", "1", "true"}, 64, {"twice", "-n, --nproc-per-node"}},
      {{"-n", "1", "--master_port", "1", "true"}, 64, {"unknown option", "--master_port", "--rdzv HOST:PORT"}},
      {{"-n", "1", "--env", "RANK=1", "true"}, 64, {"RANK", "set by zeroth-run"}},
      {{"-n", "1", "--env", "GROUP_WORLD_SIZE=1", "true"}, 64, {"GROUP_WORLD_SIZE", "set by zeroth-run"}},
      {{"-n", "1", "--env", "TORCHELASTIC_MAX_RESTARTS=1", "true"},
       64,
       {"TORCHELASTIC_MAX_RESTARTS", "set by zeroth-run"}},
      {{"-n", "1", "--env", "ZEROTH_BOUND_CORES=1", "true"}, 64, {"ZEROTH_BOUND_CORES", "set by zeroth-run"}},
      {{"-n", "1", "--hostfil", "x", "true"}, 64, {"--hostfil", "did you mean --hostfile?"}},
      {{"-n", "1", "--nnode", "2", "true"}, 64, {"--nnode", "did you mean --nnodes?"}},
      {{"--agent", "x"}, 64, {"unknown option", "--agent"}},
  };
  for (const Refusal& refusal : refusals) expect_refusal(refusal);
}

TEST(CommandLine, RefusesWhatAnotherLauncherWouldNotDo) {
  const JobSetup merged{.merge = true};  // without --no-merge
  expect_refusal({{"-n", "2", "--launcher", "jsrun", "true"}, 64, {"--launcher", "mpirun or srun", "'jsrun'"}}, merged);
  expect_refusal({{"-n", "2", "--launcher", "srun", "true"}, 64, {"cannot start srun"}},
                 {.merge = true, .environment = {{"PATH", "/none"}}});
  for (const auto& option : std::vector<std::vector<std::string>>{{"--log-dir", "d"},
                                                                  {"--stdin"},
                                                                  {"--timeout", "1"},
                                                                  {"--max-restarts", "1"},
                                                                  {"--json", "f"},
                                                                  {"--nnodes", "2"},
                                                                  {"--no-prefix"}}) {
    std::vector<std::string> arguments{"-n", "2", "--launcher", "mpirun"};
    arguments.insert(arguments.end(), option.begin(), option.end());
    arguments.emplace_back("true");
    expect_refusal({arguments, 64, {"another launcher does not know this option", option.front()}}, merged);
  }
}

TEST(CommandLine, SaysWhereAHostfileIsWrong) {
  const Scratch scratch;
  const std::string bad = scratch.file("hosts", "# comment\nnode1 slots=2\nnode2 slots=x\n");
  expect_refusal({{"--hostfile", bad, "true"}, 78, {"[CONFIG]", "where: " + bad + ":3:13;", "1 to 1024", "'x'"}});
}

TEST(CommandLine, SaysWhyAProgramCannotStart) {
  const Scratch scratch;
  const std::string text = scratch.file("text", "no interpreter line\n", 0755);
  const std::string lost = scratch.file("lost", "#!/no/such/interpreter\n", 0755);
  expect_refusal({{"-n", "2", "no-such-program"}, 64, {"cannot start no-such-program: No such file or directory"}});
  expect_refusal({{"-n", "2", "/no/such"}, 64, {"cannot start /no/such: No such file or directory"}});
  expect_refusal({{"-n", "2", "/dev/null/x"}, 64, {"cannot start /dev/null/x: Not a directory"}});
  expect_refusal({{"-n", "2", "/tmp"}, 77, {"[ENVIRONMENT]", "/tmp: Is a directory"}});
  expect_refusal({{"-n", "2", "/no/train.py"}, 64, {"cannot start /no/train.py: No such file or directory"}});
  expect_refusal({{"-n", "2", scratch.file("train.py", "")}, 77, {"[ENVIRONMENT]", "no Python", "VIRTUAL_ENV"}},
                 {.environment = {{"PATH", "/none"}, {"VIRTUAL_ENV", ""}}});
  expect_refusal({{"-n", "2", text}, 77, {"Exec format error", "#!"}});
  expect_refusal({{"-n", "2", lost}, 64, {"No such file", "interpreter"}});
}

TEST(CommandLine, RunsScriptsAndModulesByTheirPython) {
  const Scratch scratch;
  // In place of Python: says how it was called.
  const std::string python = scratch.file("venv/bin/python", "#!/bin/sh\necho \"$@\"\n", 0755);
  const std::string script = scratch.file("train.py", "no program, and not executable\n");
  const JobSetup setup{.environment = {{"VIRTUAL_ENV", scratch.path("venv")}}};
  Job by_path({"--nproc_per_node=2", script, "--lr", "1"}, setup);
  const JobResult result = by_path.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("[1] -u " + script + " --lr 1\n"));
  EXPECT_THAT(result.err, HasSubstr("zeroth-run: " + script + " is run by " + python + " -u (VIRTUAL_ENV)\n"));
  Job module({"-q", "-n", "1", "-m", "package.train", "-n", "3"}, setup);
  EXPECT_EQ(module.wait().out, "[0] -u -m package.train -n 3\n");
  Job dry({"--num_gpus", "2", "--dry-run", script}, setup);
  const JobResult said = dry.wait();
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_THAT(said.out, HasSubstr("1 host x 2 ranks; zeroth-run starts them"));
  EXPECT_THAT(said.out, HasSubstr("): " + python + " -u " + script + "\n"));
}

TEST(CommandLine, FindsProgramsAsAShellDoes) {
  const Scratch scratch;
  scratch.file("tool", "#!/bin/sh\necho first\n", 0755);
  scratch.file("second/tool", "#!/bin/sh\necho second\n", 0755);
  scratch.file("zero/tool", "not executable\n", 0644);
  const std::string path = scratch.path("zero") + ":" + scratch.path("second") + ":" + scratch.path("") + ":/bin";
  Job job({"-q", "-n", "1", "tool"}, {.environment = {{"PATH", path}}});
  EXPECT_EQ(job.wait().out, "[0] second\n");
}

TEST(CommandLine, ABareNameMayBeAProgramOfTheWorkingDirectory) {
  const Scratch scratch;
  scratch.file("tool", "#!/bin/sh\necho here\n", 0755);
  scratch.file("text", "no program\n", 0644);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(scratch.path(""));
  Job job({"-q", "-n", "1", "tool"});
  EXPECT_EQ(job.wait().out, "[0] here\n");
  scratch.file("bin/tool", "#!/bin/sh\necho path\n", 0755);
  Job first({"-q", "-n", "1", "tool"}, {.environment = {{"PATH", scratch.path("bin") + ":/bin"}}});
  EXPECT_EQ(first.wait().out, "[0] path\n") << "PATH comes first";
  expect_refusal({{"-n", "2", "text"}, 77, {"cannot start text: Permission denied"}});
  std::filesystem::current_path(before);
}

TEST(CommandLine, RefusesMoreRanksThanFilesCanBeOpened) {
  expect_refusal({{"-n", "200", "true"}, 71, {"[RESOURCE]", "too many open files", "64"}}, {.descriptor_limit = 64});
}

TEST(CommandLine, PrintsHelpAndVersion) {
  Job help({"--help"});
  const JobResult helped = help.wait();
  EXPECT_EQ(helped.exit_code, 0);
  EXPECT_THAT(helped.out, HasSubstr("Usage: zeroth-run -n N [options] PROGRAM"));
  EXPECT_THAT(helped.out, HasSubstr("Examples:"));
  EXPECT_EQ(helped.err, "");
  Job version({"--version"});
  const JobResult versioned = version.wait();
  EXPECT_EQ(versioned.exit_code, 0);
  EXPECT_THAT(versioned.out, ::testing::MatchesRegex("zeroth-run [0-9]+\\.[0-9]+\\.[0-9]+\n"));

  Job list({"--list-failpoints"});
  const JobResult listed = list.wait();
  EXPECT_EQ(listed.exit_code, 0);
  EXPECT_THAT(listed.out, ::testing::ContainsRegex(
                              "shm.reduce_scatter.mid +src/comm/shm/shared_memory_engine.cpp:[0-9]+ +all have posted"));
  EXPECT_THAT(listed.out, ::testing::HasSubstr("export.write "));
}

TEST(CommandLine, LeavesTheArgumentsOfTheProgramAlone) {
  const std::vector<std::string> odd{"-n", "7", "--help", "--", "", "a b", "$(touch x)", "`x`", "\"'", "*", "--env"};
  std::string expected;
  for (const std::string& argument : odd) expected += "[0] <" + argument + ">\n";
  std::vector<std::string> arguments{"args"};
  arguments.insert(arguments.end(), odd.begin(), odd.end());
  Job plain(Job::probe(1, arguments));
  EXPECT_EQ(plain.wait().out, expected);
  Job separated(Job::probe(1, arguments, {"--"}));
  EXPECT_EQ(separated.wait().out, expected);
}

}  // namespace
}  // namespace zeroth::test
