#include "engine/unwatched.h"

#include <zeroth/base/error.h>
#include <zeroth/comm/communicator.h>
#include <zeroth/engine/settings.h>
#include <zeroth/engine/site_line.h>
#include <zeroth/engine/world.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace zeroth {
namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

World world_of(const Variables& variables) {
  return World::from_variables([&variables](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

struct Good {
  std::string name;
  Variables variables;
  int rank;
  int size;
  int local_rank;
  std::string backend;
  std::string job;
  std::string origin;
};

// As the log's first line says them.
const std::string kNobody = "no launcher's variables";
const std::string kTorchrun = "RANK and WORLD_SIZE (torchrun)";
const std::string kRun = "RANK and WORLD_SIZE (zeroth-run)";
const std::string kMpi = "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (mpirun)";
const std::string kSlurm = "SLURM_PROCID and SLURM_NTASKS (srun)";

TEST(World, ReadsEveryLauncher) {
  const std::vector<Good> table{
      {"bare", {}, 0, 1, 0, "self", "", kNobody},
      {"alone", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, 0, 1, 0, "self", "", kTorchrun},
      {"by hand", {{"RANK", "2"}, {"WORLD_SIZE", "3"}}, 2, 3, 2, "shm", "", kTorchrun},
      {"zeroth-run",
       {{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"ZEROTH_JOB_ID", "j7"}},
       1,
       4,
       1,
       "shm",
       "j7",
       kRun},
      {"Open MPI",
       {{"OMPI_COMM_WORLD_RANK", "3"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
        {"PMIX_NAMESPACE", "prte-1@2"}},
       3,
       4,
       3,
       "shm",
       "prte-1@2",
       kMpi},
      {"Slurm step",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_STEP_NUM_NODES", "1"},
        {"SLURM_NTASKS_PER_NODE", "8"},  // what the allocation allows, not what the step has
        {"SLURM_JOB_ID", "4711"},
        {"SLURM_STEP_ID", "3"},
        {"SLURM_STEP_NUM_TASKS", "2"}},
       1,
       2,
       1,
       "shm",
       "4711.3",
       kSlurm},
      {"torchrun's come first",
       {{"RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"SLURM_PROCID", "7"},
        {"SLURM_NTASKS", "9"},
        {"OMPI_COMM_WORLD_SIZE", "x"}},
       0,
       2,
       0,
       "shm",
       "",
       kTorchrun},
      {"Open MPI on two hosts",
       {{"OMPI_COMM_WORLD_RANK", "2"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
       2,
       4,
       0,
       "shm+mpi",
       "",
       kMpi},
      {"MPI on one host by wish",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"ZEROTH_BACKEND", "mpi"}},
       0,
       2,
       0,
       "mpi",
       "",
       kMpi},
      {"MPI under Slurm",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_STEP_ID", "0"},
        {"SLURM_STEP_NUM_NODES", "2"},
        {"ZEROTH_BACKEND", "shm+mpi"}},
       3,
       4,
       1,
       "shm+mpi",
       "",
       kSlurm},
      {"MPI alone", {{"ZEROTH_BACKEND", "mpi"}}, 0, 1, 0, "mpi", "", kNobody},
      {"a mixture by wish",
       {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROTH_BACKEND", "shm|mpi"}},
       0,
       2,
       0,
       "shm|mpi",
       "",
       kTorchrun},
      {"a mixture between hosts",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_STEP_ID", "0"},
        {"SLURM_STEP_NUM_NODES", "2"},
        {"ZEROTH_BACKEND", "shm+mpi|mpi"}},
       3,
       4,
       1,
       "shm+mpi|mpi",
       "",
       kSlurm},
      {"no wish", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROTH_BACKEND", ""}}, 0, 2, 0, "shm", "", kTorchrun},
      {"the most", {{"RANK", "4095"}, {"WORLD_SIZE", "4096"}}, 4095, 4096, 4095, "shm", "", kTorchrun},
  };
  for (const Good& row : table) {
    const World world = world_of(row.variables);
    EXPECT_EQ(world.rank(), row.rank) << row.name;
    EXPECT_EQ(world.size(), row.size) << row.name;
    EXPECT_EQ(world.local_rank(), row.local_rank) << row.name;
    EXPECT_EQ(world.backend_name(), row.backend) << row.name;
    EXPECT_EQ(world.job(), row.job) << row.name;
    EXPECT_EQ(world.origin(), row.origin) << row.name;
  }
}

TEST(World, IsOneRankWhereVariablesOnlyDescribeWhatASchedulerHasGiven) {
  struct Row {
    std::string name;
    Variables variables;
    std::string line;  ///< "" = nothing is said
  };
  const std::string one = ". This is a world of one rank; hint: start ";
  const std::string four = "4 ranks with srun PROGRAM, or zeroth-run -n 4 PROGRAM";
  const std::string other = "4 ranks with Open MPI's mpirun, or zeroth-run -n 4 PROGRAM";
  const std::vector<Row> table{
      {"a bare process", {}, ""},
      {"a shell of salloc",
       {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_NUM_NODES", "2"}},
       "SLURM_NTASKS=4 is not taken: no SLURM_STEP_ID and no SLURM_PROCID, so srun has not started this process" + one +
           four},
      {"the script of sbatch",
       {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}},
       "SLURM_PROCID=0, SLURM_NTASKS=4 are not taken: no SLURM_STEP_ID of srun, so this is the batch script of the "
       "job, which runs once" +
           one + four},
      {"the script of sbatch, where it has the number of no step",
       {{"SLURM_STEP_ID", "4294967291"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}},
       "SLURM_PROCID=0, SLURM_NTASKS=4 are not taken: no SLURM_STEP_ID of srun, so this is the batch script of the "
       "job, which runs once" +
           one + four},
      {"a shell of salloc that is a step",
       {{"SLURM_STEP_ID", "3"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}},
       "SLURM_PROCID=0, SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=1 are not taken: the step has 1 task, a shell, and the "
       "others describe the allocation" +
           one + four},
      {"nodes without a number of tasks",
       {{"SLURM_JOB_ID", "7"}, {"SLURM_JOB_NUM_NODES", "2"}},
       "SLURM_JOB_NUM_NODES=2 is not taken: no SLURM_STEP_ID and no SLURM_PROCID, so srun has not started this "
       "process. This is a world of one rank; hint: start the ranks with srun PROGRAM"},
      {"a job of one task", {{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NUM_NODES", "1"}}, ""},
      {"PMI",
       {{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}},
       "PMI_RANK=0, PMI_SIZE=4 are not taken: a launcher of PMI (MPICH, Intel MPI) is none that Zeroth knows" + one +
           other},
      {"PMI of one", {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, ""},
      {"PBS", {{"PBS_NP", "4"}}, "PBS_NP=4 is not taken: PBS runs the script of a job once" + one + other},
      {"LSF",
       {{"LSB_DJOB_NUMPROC", "4"}, {"LSB_JOBID", "1"}},
       "LSB_DJOB_NUMPROC=4 is not taken: LSF runs the command of a job once" + one + other},
      {"an Indexed Job of Kubernetes",
       {{"JOB_COMPLETION_INDEX", "3"}},
       "JOB_COMPLETION_INDEX=3 is not taken: Kubernetes does not say how many pods there are" + one +
           "zeroth-run --nnodes PODS --node-rank $JOB_COMPLETION_INDEX in each"},
      {"torchrun's, for torchrun",
       {{"PET_NNODES", "4"}, {"PET_NODE_RANK", "1"}},
       "PET_NODE_RANK=1, PET_NNODES=4 are not taken: only torchrun reads them, which has not started this process" +
           one + other},
      {"no number", {{"SLURM_NTASKS", "x"}, {"PMI_SIZE", "many"}}, ""},
  };
  for (Row row : table) {
    const World world = world_of(row.variables);
    EXPECT_EQ(world.size(), 1) << row.name;
    EXPECT_EQ(world.backend_name(), "self") << row.name;
    EXPECT_EQ(world.origin(), kNobody) << row.name;
    if (const std::size_t at = row.line.find("start zeroth-run"); at != std::string::npos)
      row.line.insert(at, "for one job in all pods ");
    EXPECT_EQ(world.not_taken(), row.line) << row.name;
  }
  EXPECT_EQ(world_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"SLURM_NTASKS", "4"}, {"PMI_SIZE", "4"}}).not_taken(), "")
      << "a rank of somebody has nothing to explain";
}

TEST(World, KnowsWhoSharesItsProcessors) {
  const Variables four{{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}};
  const auto with = [](Variables variables, const std::string& name, const std::string& value) {
    variables[name] = value;
    return world_of(variables).ranks_on_host();
  };
  EXPECT_EQ(world_of({}).ranks_on_host(), 1);
  EXPECT_EQ(world_of(four).ranks_on_host(), 4);
  EXPECT_EQ(with(four, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"), 2);
  EXPECT_EQ(with(four, "OMPI_COMM_WORLD_LOCAL_SIZE", "4"), 4);
  const Variables seven{
      {"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "7"}, {"SLURM_STEP_ID", "0"}, {"ZEROTH_BACKEND", "mpi"}};
  EXPECT_EQ(with(seven, "SLURM_STEP_NUM_NODES", "1"), 7);
  EXPECT_EQ(with(seven, "SLURM_STEP_NUM_NODES", "2"), 4);
  EXPECT_EQ(with(seven, "SLURM_STEP_NUM_NODES", "4096"), 1);
}

struct Bad {
  std::string name;
  Variables variables;
  std::string which;
};

TEST(World, RefusesEverythingElseByName) {
  const std::vector<Bad> table{
      {"rank without size", {{"RANK", "0"}}, "WORLD_SIZE"},
      {"size without rank", {{"WORLD_SIZE", "2"}}, "RANK"},
      {"negative rank", {{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"negative size", {{"RANK", "0"}, {"WORLD_SIZE", "-2"}}, "WORLD_SIZE"},
      {"no ranks", {{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "RANK, WORLD_SIZE"},
      {"rank at size", {{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK, WORLD_SIZE"},
      {"word", {{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"nothing", {{"RANK", ""}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"trailing", {{"RANK", "1x"}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"space", {{"RANK", " 1"}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"plus", {{"RANK", "+1"}, {"WORLD_SIZE", "2"}}, "RANK"},
      {"fraction", {{"RANK", "0"}, {"WORLD_SIZE", "2.0"}}, "WORLD_SIZE"},
      {"hexadecimal", {{"RANK", "0"}, {"WORLD_SIZE", "0x2"}}, "WORLD_SIZE"},
      {"too many", {{"RANK", "0"}, {"WORLD_SIZE", "4097"}}, "WORLD_SIZE"},
      {"beyond int", {{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}, "WORLD_SIZE"},
      {"local rank", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "x"}}, "LOCAL_RANK"},
      {"local rank at size", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}, "LOCAL_RANK"},
      {"two hosts", {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}, "LOCAL_WORLD_SIZE"},
      {"local size", {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "four"}}, "LOCAL_WORLD_SIZE"},
      {"Open MPI half", {{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE"},
      {"Open MPI on two hosts, in shared memory by wish",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"ZEROTH_BACKEND", "shm"}},
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"no such backend", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROTH_BACKEND", "nccl"}}, "ZEROTH_BACKEND"},
      {"a mixture with a stranger",
       {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROTH_BACKEND", "shm|tcp"}},
       "ZEROTH_BACKEND"},
      {"half a mixture", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"ZEROTH_BACKEND", "shm|"}}, "ZEROTH_BACKEND"},
      {"a mixture with shared memory between hosts",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"ZEROTH_BACKEND", "shm|mpi"}},
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"Slurm half", {{"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}}, "SLURM_PROCID"},
      {"Slurm other half", {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}, "SLURM_NTASKS"},
      {"a rank of Slurm that has lost its step", {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}, "SLURM_STEP_ID"},
      {"a step of two with the variables of four",
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
       "SLURM_NTASKS"},
      {"Slurm on two hosts",
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}},
       "SLURM_STEP_NUM_NODES"},
  };
  for (const Bad& row : table) {
    try {
      (void)world_of(row.variables);
      ADD_FAILURE() << row.name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kEnvironment) << row.name;
      EXPECT_EQ(error.context().which, row.which) << row.name;
      EXPECT_FALSE(error.context().expected.empty()) << row.name;
      EXPECT_FALSE(error.context().hint.empty()) << row.name;
      EXPECT_FALSE(error.context().got.empty() && row.name != "nothing") << row.name;
    }
  }
}

TEST(World, SaysWhoseHostsNothingJoins) {
  const auto rank_and_size = [](const Variables& variables) {
    return World::without_transport([&variables](std::string_view name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  const Variables two_hosts{{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(rank_and_size(two_hosts), (World::RankAndSize{.rank = 3, .size = 4}));
  Variables step{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}};
  EXPECT_EQ(rank_and_size(step), (World::RankAndSize{.rank = 0, .size = 4}));
  step.erase("SLURM_STEP_ID");
  EXPECT_EQ(rank_and_size(step), std::nullopt) << "the script of a job of two nodes";
  EXPECT_EQ(rank_and_size({}), std::nullopt);
  EXPECT_EQ(rank_and_size({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "2"}}), std::nullopt)
      << "memory reaches all";
  EXPECT_EQ(rank_and_size(
                {{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
            std::nullopt)
      << "MPI does";
  Variables over_mpi = two_hosts;
  over_mpi["ZEROTH_BACKEND"] = "mpi";
  EXPECT_EQ(rank_and_size(over_mpi), std::nullopt) << "as it was asked for";
  EXPECT_THROW((void)rank_and_size({{"RANK", "1"}}), Error);
}

TEST(World, ABareProcessConnectsToItselfManyTimes) {
  const World world = world_of({});
  const auto table = std::make_shared<TrafficTable>();
  const auto first = world.connect({}, table);
  const World copy = world;
  const auto second = copy.connect({}, table);
  EXPECT_EQ(first->size(), 1);
  EXPECT_EQ(second->rank(), 0);
  EXPECT_NE(first->group_name(), second->group_name()) << "every engine has a group of its own";
}

TEST(World, HowCallsAreMadeIsThatOfTheFirstEngineAndNeverChosenInSilence) {
  const auto refusal = [](const World& world, Reduction reduction, bool checks) -> std::string {
    CommOptions options;
    options.reduction = reduction;
    options.check_calls = checks;
    try {
      (void)world.connect(options, std::make_shared<TrafficTable>());
    } catch (const Error& error) {
      return error.code() == ErrorCode::kConfig ? error.what() : std::string("not kConfig: ") + error.what();
    }
    return "";
  };
  const World threads = World::from_hub(make_inproc_hub(1), 0, 1);
  EXPECT_NE(refusal(threads, Reduction::kTransport, false).find("this transport has no sums of its own"),
            std::string::npos);
  EXPECT_EQ(refusal(threads, Reduction::kRankOrder, true), "") << "it always compares";
  const World alone = world_of({});
  EXPECT_EQ(refusal(alone, Reduction::kTransport, false), "") << "there is nothing to sum";
  EXPECT_EQ(refusal(alone, Reduction::kTransport, false), "");
  EXPECT_NE(refusal(alone, Reduction::kRankOrder, false).find("decided by its first engine"), std::string::npos);
  EXPECT_NE(refusal(alone, Reduction::kTransport, true).find("zeroth.check_calls"), std::string::npos);
}

TEST(World, UnwatchedRanksAreTheSameAndRecordNothing) {
  const World world = world_of({});
  const World other = detail::unwatched(world);
  EXPECT_TRUE(world.is_watched());
  EXPECT_FALSE(other.is_watched());
  EXPECT_EQ(other.size(), world.size());
  EXPECT_NE(other.job(), world.job()) << "they meet apart from the watched ones";
  const auto calls_of = [](const World& ranks) {
    Communicator(ranks.connect({}, std::make_shared<TrafficTable>())).barrier();
    return ranks.activity()->recorder().records().size();
  };
  EXPECT_EQ(calls_of(world), 1U);
  EXPECT_EQ(calls_of(other), 0U);
  EXPECT_THROW((void)detail::unwatched(World::from_hub(make_inproc_hub(1), 0, 1)), Error);
}

TEST(World, TimesOfAnEmptyConfigurationAreThoseOfTheTransports) {
  const CommOptions resolved = make_comm_options(Config{}, 4);
  const CommOptions plain;
  EXPECT_EQ(resolved.frozen_after, Milliseconds{10'000}) << "a frozen rank is named within 10 to 15 s";
  EXPECT_EQ(resolved.frozen_after, plain.frozen_after);
  EXPECT_EQ(resolved.timeout, plain.timeout);
  EXPECT_EQ(resolved.first_timeout, plain.first_timeout);
  EXPECT_EQ(resolved.end_stuck_after, plain.end_stuck_after);
}

TEST(World, ARankThatWaitsForOthersSaysWhatToDo) {
  const auto said = [](const Variables& variables) {
    CommOptions options;
    options.timeout = Milliseconds{60};
    options.meeting_notices = {.first = Milliseconds{0}, .every = Milliseconds{60'000}};
    ::testing::internal::CaptureStderr();
    EXPECT_THROW((void)world_of(variables).connect(options, std::make_shared<TrafficTable>()), Error);
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string job = "world_test-" + std::to_string(::getpid());
  const std::string all = " with zeroth-run -n 2 PROGRAM; for one rank alone unset RANK and WORLD_SIZE\n";
  const std::string started = said({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"ZEROTH_JOB_ID", job}});
  EXPECT_NE(started.find("waiting for rank 0 for "), std::string::npos) << started;
  EXPECT_NE(started.find("hint: look at the output of the ranks that do not come; or start all of them" + all),
            std::string::npos)
      << started;
  // By hand, as scripts of others do it: torch's variables alone name the job.
  ASSERT_EQ(::setenv("MASTER_ADDR", job.c_str(), 1), 0);
  ASSERT_EQ(::setenv("MASTER_PORT", "1", 1), 0);
  const std::string by_hand = said({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
  ::unsetenv("MASTER_ADDR");
  ::unsetenv("MASTER_PORT");
  EXPECT_NE(by_hand.find("waiting for rank 1 for "), std::string::npos) << by_hand;
  EXPECT_NE(by_hand.find("hint: start the other ranks, or all of them" + all), std::string::npos) << by_hand;
}

TEST(World, ASiteIsARunOfRanksWithGroupsOfItsOwn) {
  const std::shared_ptr<InprocHub> hub = make_inproc_hub(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&hub, rank] {
      const World job = World::from_hub(hub, rank, 4);
      const World site = job.site(2);
      EXPECT_EQ(site.rank(), rank % 2);
      EXPECT_EQ(site.size(), 2);
      EXPECT_EQ(site.site_index(), rank / 2);
      EXPECT_EQ(site.num_sites(), 2);
      EXPECT_EQ(job.num_sites(), 1);
      EXPECT_EQ(site.activity(), job.activity());
      const auto sum = [rank](const std::shared_ptr<CommBackend>& group) {
        std::int64_t value = rank + 1;
        Communicator(group).all_reduce(std::span(&value, 1));
        return value;
      };
      EXPECT_EQ(sum(site.connect({}, std::make_shared<TrafficTable>())), rank < 2 ? 3 : 7);
      const std::unique_ptr<SiteLine> across = site.across_sites(std::make_shared<TrafficTable>());
      EXPECT_EQ(across->site(), rank / 2);
      EXPECT_EQ(across->sites(), 2);
      const std::vector<std::optional<std::string>> texts = across->texts("rank " + std::to_string(rank));
      const std::string second = rank % 2 == 0 ? "rank 2" : "rank 3";
      EXPECT_EQ(texts, (std::vector<std::optional<std::string>>{rank % 2 == 0 ? "rank 0" : "rank 1", second}));
      EXPECT_EQ(sum(site.mesh({.axes = {{"dp", 2}}}).axis("dp").shared_backend()), rank < 2 ? 3 : 7);
      EXPECT_EQ(sum(job.connect({}, std::make_shared<TrafficTable>())), 10);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto text = [](const World& world, int count) -> std::string {
    try {
      (void)world.site(count);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const World four = world_of({{"RANK", "1"}, {"WORLD_SIZE", "4"}});
  EXPECT_NE(text(four, 3).find("[CONFIG] the ranks do not divide into sites"), std::string::npos) << text(four, 3);
  EXPECT_NE(text(four, 3).find("which: count; expected: a divisor of 4, the ranks; got: 3"), std::string::npos);
  EXPECT_NE(text(four, 0).find("[CONFIG]"), std::string::npos);
  EXPECT_NE(text(four.site(2), 2).find("[USAGE] a site of a site"), std::string::npos);
}

TEST(World, AbortBeforeAnyConnectionIsNothing) {
  world_of({}).abort(Error(ErrorCode::kInternal, "early"));
}

}  // namespace
}  // namespace zeroth
