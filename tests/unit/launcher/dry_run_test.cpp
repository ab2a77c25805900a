// What --dry-run says of a job that zeroth-run would start itself.
#include "launcher/dry_run.h"

#include "process/launcher/scratch.h"

#include <zeroth/base/error.h>
#include <zeroth/base/surroundings.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

TEST(DryRun, OnThisHost) {
  const test::Scratch scratch;
  const std::string python = scratch.file("bin/python3", "", 0755);
  const std::string script = scratch.file("train.py", "");
  Options options;
  options.num_ranks = 2;
  options.command = {script, "--name", "a b"};
  options.environment = {{"X", "1 2"}};
  options.ranks_note = "--nproc-per-node cpu: 2 ranks, one for each core";
  const std::vector<std::string> environment{"PATH=" + scratch.path("bin")};
  EXPECT_EQ(describe_plan(options, environment),
            "1 host x 2 ranks; zeroth-run starts them (no --launcher was named; mpirun and srun are the others)\n"
            "--nproc-per-node cpu: 2 ranks, one for each core\n"
            "ranks 0-1 on this host (" +
                host_name() + "): X='1 2' " + python + " -u " + script + " --name 'a b'\n" + script + " is run by " +
                python + " -u (PATH)\n");
  options.command = {"no-such-program"};
  EXPECT_THROW((void)describe_plan(options, environment), Error) << "as the job itself would";
}

TEST(DryRun, OnSeveralHostsWithoutALauncher) {
  Options options;
  options.hosts = "n1:4,n2:2";
  options.include = "n1:1,3@n2";
  options.ssh = "ssh";
  options.command = {"train.py", "--lr", "1"};
  const std::string expected =
      "2 hosts x 2 ranks = 4 (--hosts); zeroth-run starts them by ssh (no --launcher was named; mpirun and srun are "
      "the others)\n"
      "ranks 0-1 on n1: CUDA_VISIBLE_DEVICES=1,3 train.py --lr 1\n"
      "ranks 2-3 on n2: train.py --lr 1\n";
  EXPECT_EQ(describe_plan(options, {"PATH=/none", "VIRTUAL_ENV=/opt/venv"}),
            expected + "Python, on each host: /opt/venv/bin/python (VIRTUAL_ENV), else python3 or python of PATH\n");
  EXPECT_EQ(describe_plan(options, {}), expected + "Python, on each host: python3 or python of PATH\n");
}

TEST(DryRun, OfOneNodeOfSeveral) {
  Options options;
  options.num_ranks = 8;
  options.num_nodes = 2;
  options.node = 1;
  options.rendezvous = {.host = "node0", .port = 29400};
  options.command = {"/bin/true"};
  EXPECT_EQ(describe_plan(options, {}),
            "2 nodes, which meet at node0:29400; zeroth-run is started on each (no --launcher was named; mpirun and "
            "srun are the others)\n"
            "node 1, 8 ranks after those of the nodes before it, on this host (" +
                host_name() + "): /bin/true\n");
}

}  // namespace
}  // namespace zeroth::launcher
