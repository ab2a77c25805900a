// A rank is killed, frozen, leaves, throws or is interrupted at the n-th call that the engine makes to its transport,
// for n over a whole step: all ranks end in time, nothing is left. And ranks that are processes give the bits of ranks
// that are threads.
#include "comm/decorators/faulty_backend.h"
#include "process/engine_ranks.h"
#include "support/process_groups.h"
#include "support/tier.h"

#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth::test {
namespace {

/// Strikes at the n-th call.
class TripBackend final : public ForwardingBackend {
 public:
  TripBackend(std::unique_ptr<CommBackend> inner, Fault fault, int at)
      : ForwardingBackend(std::move(inner)), fault_(fault), left_(at) {}

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    count();
    return inner().submit(collectives, stream);
  }
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    count();
    inner().wait_until(predicate, context);
  }
  void notify() override {
    count();
    inner().notify();
  }

 private:
  void count() {
    if (--left_ != 0) return;
    strike(fault_);
  }
  Fault fault_;
  int left_;
};

constexpr int kVictim = 1;

class EngineFaults : public ::testing::TestWithParam<std::tuple<Fault, int>> {};

TEST_P(EngineFaults, EveryRankEndsInTimeAndNothingIsLeft) {
  const auto [fault, stage] = GetParam();
  int turn = static_cast<int>(fault) + stage;
  for (int at = 1; at <= 40; at += fault == Fault::kFreeze ? 9 : 3) {
    // A quarter in `make test`: each fault at each of these calls, and each stage, in some case.
    if (turn++ % 4 != 0 && !in_long_tier()) continue;
    SCOPED_TRACE("call " + std::to_string(at));
    const std::string job = unique_job();
    ForkRanksOptions options;
    options.deadline = kHangs;
    if (fault == Fault::kFreeze) {
      options.meanwhile = [](const std::vector<pid_t>& pids, Milliseconds) { return wait_to_wake(pids, kVictim); };
    }
    ToyTraining training = process_training(stage);
    training.steps = 50;
    training.decorate = [at, kind = fault](std::unique_ptr<CommBackend> inner, int of) -> std::unique_ptr<CommBackend> {
      if (of != kVictim) return inner;
      return std::make_unique<TripBackend>(std::move(inner), kind, at);
    };
    const ForkReport report = fork_ranks(kWorld, [&](int rank) { train_as_rank(training, rank, job); }, options);
    expect_victim_is_named(report, fault, kVictim);
  }
}

const auto kFaultsAtStages =
    ::testing::Combine(::testing::Values(Fault::kKill, Fault::kFreeze, Fault::kExit, Fault::kThrow, Fault::kInterrupt),
                       ::testing::Values(0, 1, 2, 3));

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<Fault, int>>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "Stage" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(AllFaults, EngineFaults, kFaultsAtStages, name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, EngineFaults, kFaultsAtStages, name_of_case);

std::string text_of(const ToyOutcome& outcome) {
  std::string text;
  for (std::size_t step = 0; step < outcome.losses.size(); ++step)
    text += outcome.losses[step] + " " + outcome.norms[step] + "\n";
  return text;
}

/// With the training's nodes.
CommOptions options_of(const ToyTraining& training) {
  CommOptions options = process_options();
  options.nodes = nodes_of_ranks(training.world, training.per_node);
  return options;
}

/// Losses and norms of ranks that are processes, over a transport of ProcessGroups.
std::string train_in_processes(const ToyTraining& training, ForkRanksOptions options = {},
                               const char* transport = "shm") {
  ProcessGroups groups(transport, training.world, options_of(training));
  const std::string path = ::testing::TempDir() + unique_job() + ".txt";
  options.meanwhile = groups.parted(std::move(options.meanwhile));
  const ForkReport report = fork_ranks(
      training.world,
      [&](int rank) {
        const ToyOutcome own = train_toy_rank(training, groups.group(rank));
        if (rank == 0) std::ofstream(path) << text_of(own);
      },
      options);
  EXPECT_TRUE(report.ok()) << report.text();
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  ::unlink(path.c_str());
  return text;
}

/// Over stages and worlds in `make test` as in toy_parity_test: what is asked here is what processes share.
void expect_bits_of_threads(const std::vector<int>& worlds, const std::vector<int>& stages) {
  for (const int world : worlds) {
    ToyTraining training = process_training(0);
    training.world = world;
    training.skip = [](int rank, std::int64_t step, int block) { return (rank + step + block) % 4 == 0; };
    const std::string expected = text_of(train_toy(training));
    for (const int stage : stages) {
      training.plan = zero_plan(stage, {"dp"});
      EXPECT_EQ(train_in_processes(training), expected) << "stage " << stage << " world " << world;
    }
  }
}

TEST(EngineProcesses, GiveTheBitsOfThreadsAtEveryStage) {
  expect_bits_of_threads({3}, {0, 1, 2, 3});
}

TEST(LongEngineProcesses, GiveTheBitsOfThreadsAtEveryStageInEveryWorld) {
  expect_bits_of_threads({1, 2, 3, 4}, {0, 1, 2, 3});
}

void expect_random_paths_equal(int steps) {
  ToyTraining training = process_training(0);
  training.world = 3;
  training.steps = steps;
  training.skip = random_paths(3);
  const std::string expected = text_of(train_toy(training));
  for (int stage = 1; stage <= 3; ++stage) {
    training.plan = zero_plan(stage, {"dp"});
    EXPECT_EQ(train_in_processes(training), expected) << "stage " << stage;
  }
}

TEST(EngineProcesses, RandomPathsOverAHundredStepsEqualTheReference) {
  expect_random_paths_equal(100);
}

TEST(LongEngineProcesses, RandomPathsOverAThousandStepsEqualTheReference) {
  expect_random_paths_equal(1'000);
}

TEST(EngineProcesses, GiveTheBitsOfThreadsAtDegreesOfSharding) {
  ToyTraining training = process_training(0);
  training.model.width = 97;
  training.world = 4;
  training.per_node = 2;
  training.skip = [](int rank, std::int64_t step, int block) { return (rank + step + block) % 4 == 0; };
  const std::string expected = text_of(train_toy(training));
  for (const ShardingPlan& plan : {hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"}), hpz_plan(1, {"dp"})}) {
    training.plan = plan;
    EXPECT_EQ(train_in_processes(training), expected) << plan.name;
  }
}

/// Four ranks on two nodes, with shared memory inside them: `plans` of what two levels keep there, and what they do
/// not.
std::vector<ShardingPlan> plans_on_nodes() {
  std::vector<ShardingPlan> plans;
  for (const int gradient_degree : {0, 2}) {
    for (const ShardingPlan& plan : {zero_plan(0, {"dp"}), zero_plan(2, {"dp"}), zero_plan(3, {"dp"}),
                                     hsdp_plan(2, {"dp"}), hpz_plan(2, {"dp"})}) {
      plans.push_back(plan);
      plans.back().gradient_degree = gradient_degree;
      plans.back().name += "-g" + std::to_string(gradient_degree);
    }
  }
  return plans;
}

ToyTraining training_on_nodes() {
  ToyTraining training = process_training(0);
  training.model.width = 97;
  training.world = 4;
  training.per_node = 2;
  training.micro_steps = 2;
  training.skip = [](int /*rank*/, std::int64_t step, int block) { return (step + block) % 4 == 0; };
  return training;
}

TEST(EngineProcesses, GiveTheBitsOfThreadsOverTwoLevels) {
  ToyTraining training = training_on_nodes();
  for (const ShardingPlan& plan : plans_on_nodes()) {
    training.plan = zero_plan(0, {"dp"});
    training.plan.gradient_degree = plan.gradient_degree;
    const std::string expected = text_of(train_toy(training));
    training.plan = plan;
    EXPECT_EQ(train_in_processes(training, {}, "shm+sockets"), expected) << plan.name;
  }
}

/// Ranks of the victim's node wait in shared memory, those of the other one for messages: all hear of it.
/// One in `turns` of all faults, plans and calls.
void expect_orderly_ends_over_two_levels(int turns) {
  int turn = 0;
  for (const Fault fault : {Fault::kKill, Fault::kThrow}) {
    for (const ShardingPlan& plan : plans_on_nodes()) {
      if (plan.gradient_degree == 0 || plan.degrees(4).parameter == 4) continue;
      for (const int at : {2, 5, 9, 14, 20, 27}) {
        if (turn++ % turns != 0) continue;
        SCOPED_TRACE(plan.name + ", call " + std::to_string(at));
        ToyTraining training = training_on_nodes();
        training.plan = plan;
        training.steps = 50;
        training.decorate = [at, fault](std::unique_ptr<CommBackend> inner, int of) -> std::unique_ptr<CommBackend> {
          if (of != kVictim) return inner;
          return std::make_unique<TripBackend>(std::move(inner), fault, at);
        };
        ProcessGroups groups("shm+sockets", training.world, options_of(training));
        const ForkReport report =
            fork_ranks(training.world, [&](int rank) { (void)train_toy_rank(training, groups.group(rank)); },
                       {.deadline = kHangs, .meanwhile = groups.parted({})});
        for (const ProcessEnd& end : report.ends) {
          EXPECT_FALSE(end.killed_at_deadline) << report.text();
          if (end.rank == kVictim) continue;
          const RankFailure* const failure = report.of(end.rank);
          ASSERT_TRUE(failure != nullptr && failure->code.has_value()) << report.text();
          EXPECT_EQ(exit_code(*failure->code), 76) << report.text();
        }
      }
    }
  }
}

TEST(EngineFaultsOverTwoLevels, EveryRankEndsInTimeAndNothingIsLeft) {
  expect_orderly_ends_over_two_levels(5);
}

TEST(LongEngineFaultsOverTwoLevels, EveryRankEndsInTimeAndNothingIsLeft) {
  expect_orderly_ends_over_two_levels(1);
}

TEST(EngineProcesses, AreResidentWithinTwoPagesOfThePlan) {
  for (int stage = 0; stage <= 3; ++stage) {
    ToyTraining training = process_training(stage);
    training.model = {.width = 200, .blocks = 6};  // some arenas above a huge page, some below
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(training.world, [&](int rank) {
      const ToyOutcome own = train_toy_rank(
          training,
          make_backend("shm", {.rank = rank, .size = training.world, .job = job, .options = process_options()}));
      const MemoryReport& memory = own.memory.front();
      // Both mappings end within a page, and all of it is used: what is not resident was planned in vain.
      if (memory.resident > memory.planned.total() + 2 * kPageBytes ||
          memory.resident + 2 * kPageBytes < memory.planned.total() || memory.measured_peak != memory.planned) {
        throw std::runtime_error(to_text(memory));
      }
    });
    EXPECT_TRUE(report.ok()) << "stage " << stage << "\n" << report.text();
  }
}

/// Resident bytes of this process, whatever they are for.
std::uint64_t resident_bytes_of_process() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t size_pages = 0;
  std::uint64_t resident_pages = 0;
  file >> size_pages >> resident_pages;
  return resident_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST(EngineProcesses, ResidentMemoryDoesNotGrowOverTwoHundredSteps) {
  if (kAddressSanitizer || kThreadSanitizer) GTEST_SKIP() << "not under sanitizers: they keep what was freed";
  // Also what no ledger counts. A page a step would be 0.8 MiB; what is lost less often than that stays below the
  // limit.
  constexpr std::uint64_t kLimitBytes = std::uint64_t{1} << 20U;
  constexpr int kWarmSteps = 20;
  for (const int stage : {0, 3}) {
    ToyTraining training = process_training(stage);
    training.steps = kWarmSteps + 200;
    std::uint64_t warm_bytes = 0;
    training.after_step = [&](Engine&, ToyModel&, const StepResult& result) {
      if (result.step == kWarmSteps) warm_bytes = resident_bytes_of_process();
      if (result.step != training.steps) return;
      const std::uint64_t bytes = resident_bytes_of_process();
      require(bytes < warm_bytes + kLimitBytes, "resident after " + std::to_string(kWarmSteps) + " steps " +
                                                    std::to_string(warm_bytes) + " bytes, after 200 more " +
                                                    std::to_string(bytes));
    };
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(kWorld, [&](int rank) { train_as_rank(training, rank, job); });
    EXPECT_TRUE(report.ok()) << "stage " << stage << "\n" << report.text();
  }
}

void expect_no_bit_changed_by_delays(std::uint64_t seeds) {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    ToyTraining training = process_training(3);
    training.world = 2 + static_cast<int>(seed % 3);
    training.skip = [seed](int rank, std::int64_t step, int block) {
      return (static_cast<std::uint64_t>(rank + step + block) + seed) % 5 == 0;
    };
    const std::string expected = text_of(train_toy(training));
    training.mode = ExecutionMode::kChaos;
    training.chaos_seed = seed;
    training.plan.prefetch_units = 1 + static_cast<int>(seed % 2);
    training.decorate = [seed](std::unique_ptr<CommBackend> inner, int) -> std::unique_ptr<CommBackend> {
      return std::make_unique<FaultyBackend>(std::move(inner), FaultPlan{.seed = seed, .delay_probability = 0.3});
    };
    EXPECT_EQ(train_in_processes(training), expected) << "seed " << seed;
  }
}

TEST(EngineProcesses, DelaysChangeNoBit) {
  expect_no_bit_changed_by_delays(6);
}

TEST(LongEngineProcesses, DelaysOfManySeedsChangeNoBit) {
  expect_no_bit_changed_by_delays(24);
}

TEST(EngineProcesses, SurviveShortFreezes) {
  ToyTraining training = process_training(0);
  training.steps = 300;
  const std::string expected = text_of(train_toy(training));
  training.plan = zero_plan(3, {"dp"});
  ForkRanksOptions options;
  int turn = 0;
  options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
    // Stops each rank in turn for a moment that is shorter than frozen_after.
    const pid_t pid = pids[static_cast<std::size_t>(turn++ % kWorld)];
    ::kill(pid, SIGSTOP);
    ::usleep(20'000);
    ::kill(pid, SIGCONT);
    return turn < 12;
  };
  EXPECT_EQ(train_in_processes(training, options), expected);
}

}  // namespace
}  // namespace zeroth::test
