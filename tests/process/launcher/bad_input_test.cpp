// Bad hostfiles, command lines and environments, through the real programs: each ends with one line that has the exit
// code's name, the place (line and column, option or variable) and what to do about it.
#include "process/launcher/job.h"
#include "process/launcher/scratch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::HasSubstr;

struct Row {
  std::vector<std::string> input;  ///< arguments; the text of a hostfile; variables
  int exit_code;
  std::string place;  ///< "line:column", an option, a variable
  std::string hint;
};

void expect_line(const std::string& text, const Row& row, const std::string& place) {
  EXPECT_EQ(std::ranges::count(text, '\n'), 1) << text;
  EXPECT_THAT(text, HasSubstr(place));
  const std::size_t hint = text.find("; hint: ");
  ASSERT_NE(hint, std::string::npos) << text;
  EXPECT_THAT(text.substr(hint), HasSubstr(row.hint)) << text;
}

void expect_refused(const std::vector<std::string>& arguments, const Row& row, const std::string& place) {
  Job job(arguments, {.merge = true});
  const JobResult result = job.wait();
  EXPECT_EQ(result.exit_code, row.exit_code) << result.err;
  EXPECT_EQ(result.out, "");
  expect_line(result.err, row, place);
}

TEST(BadInput, Hostfiles) {
  const std::string slots = "slots=<ranks for this host>";
  const std::vector<Row> table{
      {{""}, 78, "1:1", "never this host alone"},
      {{"# nobody\n\n"}, 78, "1:1", "never this host alone"},
      {{"a\n"}, 78, "1:2", "add slots="},
      {{"a slots=1\nb 2\n"}, 78, "2:3", "add slots="},
      {{"a SLOTS=2\n"}, 78, "1:3", "add slots="},
      {{"a slots=\n"}, 78, "1:9", slots},
      {{"a slots=0\n"}, 78, "1:9", slots},
      {{"a slots=-1\n"}, 78, "1:9", slots},
      {{"a slots=01\n"}, 78, "1:9", slots},
      {{"a slots=1025\n"}, 78, "1:9", slots},
      {{"a slots=99999999999999999999\n"}, 78, "1:9", slots},
      {{"a slots=0x10\n"}, 78, "1:9", slots},
      {{"a slots=2 max_slots=4\n"}, 78, "1:11", "one host a line"},
      {{"slots=2 a\n"}, 78, "1:1", "the host comes first"},
      {{"a slots=2\r\nb slots=2\r\n"}, 78, "1:10", "Windows line ends"},
      {{std::string("a\0b slots=2\n", 12)}, 78, "1:2", "no text file"},
      {{"\xef\xbb\xbf"
        "a slots=2\n"},
       78,
       "1:1",
       "without BOM"},
      {{"a slots=2\nb slots=2\n A slots=1\n"}, 78, "3:2", "the first is at line 1"},
      {{"-oProxyCommand=x slots=2\n"}, 78, "1:1", "never begins with '-'"},
      {{"root@a slots=2\n"}, 78, "1:1", "ssh's configuration"},
      {{"a:22 slots=2\n"}, 78, "1:1", "without a port"},
      {{"$(reboot) slots=2\n"}, 78, "1:1", "that ssh takes"},
      {{"fe80::1%eth0 slots=2\n"}, 78, "1:1", "give the host a name"},
      {{"[a] slots=2\n"}, 78, "1:1", "[fd00::7]"},
  };
  const Scratch scratch;
  for (const Row& row : table) {
    SCOPED_TRACE(::testing::PrintToString(row.input.front()));
    const std::string file = scratch.file("hosts", row.input.front());
    expect_refused({"--hostfile", file, "true"}, row, "where: " + file + ":" + row.place + ";");
  }
}

TEST(BadInput, CommandLines) {
  const std::vector<std::string> nodes{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv"};
  const auto node = [&nodes](const std::string& rdzv) {
    std::vector<std::string> arguments = nodes;
    arguments.insert(arguments.end(), {rdzv, "true"});
    return arguments;
  };
  const std::string help = "zeroth-run --help";
  const std::vector<Row> table{
      {{}, 64, "no program", help},
      {{"true"}, 64, "-n N", help},
      {{"-n", "0", "true"}, 64, "which: -n;", help},
      {{"-n", "4097", "true"}, 64, "which: -n;", help},
      {{"-n", "2x", "true"}, 64, "which: -n;", help},
      {{"-n", "2", "--tea", "d", "true"}, 64, "which: --tea;", "did you mean --tee?"},
      {{"-n", "2", "--timeout", "soon", "true"}, 64, "which: --timeout;", help},
      {{"-n", "2", "--grace", "nan", "true"}, 64, "which: --grace;", help},
      {{"-n", "2", "--preempt-grace", "0", "true"}, 64, "which: --preempt-grace;", help},
      {{"-n", "2", "--env", "1A=b", "true"}, 64, "which: --env;", help},
      {{"-n", "2", "--env", "RANK=1", "true"}, 64, "which: RANK;", help},
      {{"-n", "2", "--max-restarts", "-1", "true"}, 64, "which: --max-restarts;", help},
      {{"-n", "2", "--json", "/no/such/folder/status", "true"}, 74, "where: --json;", "a folder that is there"},
      {{"-n", "2", "--log-dir", "/dev/null/logs", "true"}, 74, "where: --log-dir;", "give a folder"},
      {{"-n", "2", "--timeout", "1", "--timeout", "2", "true"}, 64, "got: --timeout was given more than once", help},
      {{"-n", "2", "--timeout"}, 64, "got: --timeout has no value", help},
      {{"-n", "2", "--bind-cores", "yes", "true"}, 64, "which: --bind-cores;", help},
      {{"-n", "2", "no-such-program"}, 64, "cannot start no-such-program", "neither in a directory of PATH"},
      {{"-n", "2", "/no/such"}, 64, "cannot start /no/such", "check the path"},
      {{"-n", "2", "--include", "a", "true"}, 64, "which: --include;", "add --hostfile or --hosts"},
      {{"-n", "2", "--node-rank", "0", "true"}, 64, "which: --node-rank;", "add --nnodes"},
      {{"-n", "2", "--launcher", "jsrun", "true"}, 64, "which: --launcher;", help},
      {{"-n", "2", "--rdzv_endpoint", "a:1", "true"}, 64, "which: --rdzv_endpoint;", "write --rdzv HOST:PORT"},
      {{"-n", "2", "--nproc_per_node", "2", "true"}, 64, "which: -n, --nproc-per-node;", "give one of them"},
      {{"--nproc_per_node", "tpu", "true"}, 64, "which: --nproc-per-node;", "write -n N"},
      {{"--hosts", "a:1", "--num_gpus", "2", "true"}, 64, "which: host a;", "a:2 in --hosts"},
      {{"--hosts", "a:1", "--nproc-per-node", "gpu", "true"}, 64, "which: --nproc-per-node;", "leave it out"},
      {{"--hosts", "a", "--hostfile", "b", "true"}, 64, "--hostfile and --hosts", "give one of the two"},
      {{"--hostfile", "no/hosts", "true"}, 74, "where: --hostfile; which: no/hosts;", "the working directory is /"},
      {{"--hostfile", "/no/hosts", "true"},
       74,
       "where: --hostfile; which: /no/hosts;",
       "this host alone is never taken instead"},
      {{"--hostfile", "/dev/null", "true"}, 78, "where: --hostfile; which: /dev/null;", "the path of a file"},
      {{"--hosts", "a:0", "true"}, 64, "where: --hosts:1:3;", "<ranks for this host>"},
      {{"--hosts", "a,", "true"}, 64, "where: --hosts:1:3;", "a host is missing here"},
      {{"--hosts", "fd00::7", "true"}, 64, "where: --hosts:1:6;", "in brackets"},
      {{"--hosts", "a,b,A", "true"}, 64, "where: --hosts:1:5;", "the first is at column 1"},
      {{"--hosts", "a:2", "-n", "3", "true"}, 64, "which: -n;", "more slots"},
      {{"--hosts", "a:2", "--stdin", "true"}, 64, "which: --stdin;", "let rank 0 read a file"},
      {{"--hosts", "node1", "--include", "node2", "true"}, 64, "where: --include:1:1;", "did you mean node1?"},
      {{"--hosts", "a:2", "--include", "a:2", "true"}, 64, "where: --include:1:3;", "counted from 0"},
      {{"--hosts", "a:2", "--include", "a:1,1", "true"}, 64, "where: --include:1:5;", "leave one of them out"},
      {{"--hosts", "a:2", "--include", "a@a", "true"}, 64, "where: --include:1:3;", "at one place"},
      {{"--hosts", "a:2,b", "--exclude", "a,b", "true"}, 64, "where: --exclude:1:2;", "parted by '@'"},
      {{"--hosts", "a", "--exclude", "a", "true"}, 64, "which: --exclude;", "exclude fewer"},
      {{"--hosts", "a", "--remote-program", "x; reboot", "true"}, 64, "which: --remote-program;", help},
      {{"-n", "1", "--nnodes", "0", "true"}, 64, "which: --nnodes;", help},
      {{"-n", "1", "--nnodes", "2", "true"}, 64, "which: --node-rank;", help},
      {node("a"), 64, "where: --rdzv:1:2;", "for example node0:29400"},
      {node("a:0"), 64, "where: --rdzv:1:3;", "the same free port"},
      {node("::1:80"), 64, "where: --rdzv:1:1;", "in brackets"},
      {{"-n", "1", "--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1", "--rdzv-secret-file", "/no/secret", "true"},
       74,
       "where: --rdzv-secret-file;",
       "this user may read"},
  };
  for (const Row& row : table) {
    SCOPED_TRACE(::testing::PrintToString(row.input));
    expect_refused(row.input, row, row.place);
  }
}

/// What the program wrote, and its exit code.
std::pair<std::string, int> world_from(const std::vector<std::string>& variables) {
  std::string command = "env -i";
  for (const std::string& variable : variables) command += " '" + variable + "'";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen((command + " " WORLD_PROBE_PATH " 2>&1").c_str(), "r"),
                                                   [](FILE*) { return 0; });
  std::string text;
  std::array<char, 4096> block{};
  for (std::size_t bytes = 0; (bytes = std::fread(block.data(), 1, block.size(), pipe.get())) > 0;)
    text.append(block.data(), bytes);
  const int status = ::pclose(pipe.get());
  return {text, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

TEST(BadInput, Environments) {
  const std::string start = "start the ranks with zeroth-run -n N PROGRAM";
  const std::vector<Row> table{
      {{"RANK=0"}, 77, "WORLD_SIZE", start},
      {{"WORLD_SIZE=2"}, 77, "RANK", start},
      {{"RANK=-1", "WORLD_SIZE=2"}, 77, "RANK", start},
      {{"RANK=one", "WORLD_SIZE=2"}, 77, "RANK", start},
      {{"RANK=", "WORLD_SIZE=2"}, 77, "RANK", start},
      {{"RANK= 1", "WORLD_SIZE=2"}, 77, "RANK", start},
      {{"RANK=0", "WORLD_SIZE=2.0"}, 77, "WORLD_SIZE", start},
      {{"RANK=0", "WORLD_SIZE=0x2"}, 77, "WORLD_SIZE", start},
      {{"RANK=0", "WORLD_SIZE=4097"}, 77, "WORLD_SIZE", start},
      {{"RANK=0", "WORLD_SIZE=99999999999999999999"}, 77, "WORLD_SIZE", start},
      {{"RANK=0", "WORLD_SIZE=0"}, 77, "RANK, WORLD_SIZE", "counted from 0"},
      {{"RANK=2", "WORLD_SIZE=2"}, 77, "RANK, WORLD_SIZE", "counted from 0"},
      {{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=x"}, 77, "LOCAL_RANK", start},
      {{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=2"}, 77, "LOCAL_RANK", "or unset it"},
      {{"RANK=0", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2"}, 77, "LOCAL_WORLD_SIZE", "ZEROTH_BACKEND=shm+mpi"},
      {{"RANK=0", "WORLD_SIZE=2", "ZEROTH_BACKEND=nccl"}, 77, "ZEROTH_BACKEND", "unset it"},
      {{"RANK=0", "WORLD_SIZE=2", "ZEROTH_BACKEND=shm|"}, 77, "ZEROTH_BACKEND", "unset it"},
      {{"OMPI_COMM_WORLD_RANK=0"}, 77, "OMPI_COMM_WORLD_SIZE", start},
      {{"SLURM_NTASKS=2", "SLURM_STEP_ID=0"}, 77, "SLURM_PROCID", start},
      {{"SLURM_PROCID=1", "SLURM_NTASKS=2"}, 77, "SLURM_STEP_ID", "into a container, too"},
      {{"SLURM_PROCID=1", "SLURM_NTASKS=4", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=2"},
       77,
       "SLURM_NTASKS",
       "--preserve-env"},
      {{"SLURM_PROCID=0", "SLURM_NTASKS=4", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=2"},
       77,
       "SLURM_STEP_NUM_NODES",
       "ZEROTH_BACKEND=shm+mpi"},
  };
  EXPECT_EQ(world_from({"RANK=1", "WORLD_SIZE=2"}), std::pair(std::string("rank 1 of 2 over shm\n"), 0));
  EXPECT_EQ(world_from({"SLURM_NTASKS=2"}), std::pair(std::string("rank 0 of 1 over self\n"), 0));
  for (const Row& row : table) {
    SCOPED_TRACE(::testing::PrintToString(row.input));
    const auto [text, exit_code] = world_from(row.input);
    EXPECT_EQ(exit_code, row.exit_code) << text;
    EXPECT_THAT(text, ::testing::StartsWith("[ENVIRONMENT] "));
    expect_line(text, row, "which: " + row.place + ";");
  }
}

}  // namespace
}  // namespace zeroth::test
