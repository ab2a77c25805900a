// The command lines of other launchers.
#include "launcher/delegate.h"

#include "process/launcher/scratch.h"

#include <zeroth/base/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroth::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Options options_for(const std::string& launcher) {
  Options options;
  options.launcher = launcher;
  options.num_ranks = 4;
  options.command = {"python", "train.py", "--name", "it's; a $test"};
  return options;
}

std::string text_for(const Options& options,
                     const std::vector<std::string>& environment = {"A=1", "SSH_TTY=x", "OMPI_B=2", "X=0"}) {
  return shell_text(delegation_of(options, environment));
}

TEST(Delegation, OnThisHost) {
  EXPECT_EQ(text_for(options_for("mpirun")), "mpirun -n 4 python train.py --name 'it'\\''s; a $test'");
  EXPECT_EQ(text_for(options_for("srun")),
            "srun --ntasks=4 --nodes=1 --export=ALL python train.py --name 'it'\\''s; a $test'");
}

TEST(Delegation, OnSeveralHosts) {
  for (const auto& [launcher, expected] :
       {std::pair{"mpirun", "X='a b' mpirun -n 4 -H n1:2,n2:2 -x A -x X python "},
        std::pair{"srun",
                  "X='a b' ZEROTH_BACKEND=shm+mpi srun --ntasks=4 --nodes=2 --ntasks-per-node=2 --nodelist=n1,n2 "
                  "--mpi=pmix --export=ALL python "}}) {
    Options options = options_for(launcher);
    options.hosts = "n1:2,n2:4";
    options.num_ranks = 4;
    options.environment = {{"X", "a b"}};
    EXPECT_THAT(text_for(options), ::testing::StartsWith(expected));
  }
}

TEST(Delegation, SrunOnSeveralHostsAsksForMpiUnlessTheUserHasChosen) {
  Options options = options_for("srun");
  options.hosts = "n1:2,n2:2";
  EXPECT_THAT(text_for(options, {"ZEROTH_BACKEND=mpi"}), ::testing::StartsWith("srun "));
  EXPECT_THAT(text_for(options, {"ZEROTH_BACKEND="}), ::testing::StartsWith("ZEROTH_BACKEND=shm+mpi srun "));
  EXPECT_THAT(text_for(options, {"ZEROTH_BACKEND_=x"}), ::testing::StartsWith("ZEROTH_BACKEND=shm+mpi srun "));
  EXPECT_THAT(text_for(options, {"SLURM_MPI_TYPE=pmi2"}), Not(HasSubstr("--mpi")));
  options.environment = {{"ZEROTH_BACKEND", "mpi"}};
  EXPECT_THAT(text_for(options), ::testing::StartsWith("ZEROTH_BACKEND=mpi srun "));
  options.hosts = "n1:4";
  options.environment.clear();
  EXPECT_THAT(text_for(options), AllOf(::testing::StartsWith("srun "), Not(HasSubstr("--mpi"))));
}

TEST(Delegation, BindingIsToldOnlyIfAsked) {
  Options options = options_for("mpirun");
  options.bind = BindCores::kOff;
  EXPECT_THAT(text_for(options), HasSubstr(" --bind-to none "));
  options.launcher = "srun";
  options.bind = BindCores::kOn;
  EXPECT_THAT(text_for(options), HasSubstr(" --cpu-bind=cores "));
}

TEST(Delegation, APythonScriptIsRunByThePythonOfThisHost) {
  const test::Scratch scratch;
  const std::string python = scratch.file("venv/bin/python", "", 0755);
  const std::string script = scratch.file("train.py", "");
  for (const auto& [launcher, head] :
       {std::pair{"mpirun", "mpirun -n 4 "}, std::pair{"srun", "srun --ntasks=4 --nodes=1 --export=ALL "}}) {
    Options options = options_for(launcher);
    options.command = {script, "-x"};
    EXPECT_EQ(text_for(options, {"VIRTUAL_ENV=" + scratch.path("venv")}), head + python + " -u " + script + " -x");
    options.command = {"-m", "train"};
    EXPECT_EQ(text_for(options, {"PATH=" + scratch.path("venv/bin")}), head + python + " -u -m train");
  }
}

TEST(Delegation, RefusesWhatTheOtherLauncherCannotBeTold) {
  const auto refused = [](const std::string& launcher, const std::string& hosts,
                          const std::string& include) -> std::string {
    Options options = options_for(launcher);
    options.hosts = hosts;
    options.include = include;
    options.num_ranks = 0;
    try {
      return "not refused: " + text_for(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      return error.what();
    }
  };
  EXPECT_THAT(refused("mpirun", "a:2,b:2", "a:1"), HasSubstr("single slots cannot be chosen"));
  EXPECT_THAT(refused("mpirun", "a:2,[fd00::1]:2", ""),
              HasSubstr("no IPv6 address; where: --launcher mpirun; which: fd00::1"));
  EXPECT_THAT(refused("srun", "a:2,b:3", ""),
              HasSubstr("one number of ranks for all hosts; where: --launcher srun; which: b"));
  Options options = options_for("srun");
  options.command = {"-x"};
  EXPECT_THROW((void)delegation_of(options, {}), Error);
}

}  // namespace
}  // namespace zeroth::launcher
