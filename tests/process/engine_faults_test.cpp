// A rank is killed, frozen, leaves, throws or is interrupted in any phase of a step: all ranks end in time, nothing is left.
// Phases are found by counting: the fault strikes at the n-th call that the engine makes to its transport, for n over a whole step.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>

#include <zeroth/comm/decorators.h>
#include <zeroth/comm/factory.h>

#include "support/fork_ranks.h"
#include "support/toy_training.h"

namespace zeroth::testing {
namespace {

enum class Fault { kKill, kFreeze, kExit, kThrow, kInterrupt };

constexpr const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::kKill: return "Kill";
    case Fault::kFreeze: return "Freeze";
    case Fault::kExit: return "Exit";
    case Fault::kThrow: return "Throw";
    case Fault::kInterrupt: return "Interrupt";
  }
  return "";
}

/// Strikes at the n-th call.
class TripBackend final : public ForwardingBackend {
 public:
  TripBackend(std::unique_ptr<CommBackend> inner, Fault fault, int at) : ForwardingBackend(std::move(inner)), fault_(fault), left_(at) {}

  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    count();
    return inner().submit(collectives, stream);
  }
  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    count();
    inner().wait_until(predicate, context);
  }
  void ring() override {
    count();
    inner().ring();
  }

 private:
  void count() {
    if (--left_ != 0) return;
    switch (fault_) {
      case Fault::kKill: ::raise(SIGKILL); break;
      case Fault::kFreeze: ::raise(SIGSTOP); break;
      case Fault::kExit: ::_exit(0);
      case Fault::kInterrupt: ::raise(SIGINT); break;
      case Fault::kThrow: throw std::runtime_error("planted exception");
    }
  }
  Fault fault_;
  int left_;
};

constexpr int kWorld = 3;
constexpr int kVictim = 1;

CommOptions process_options() {
  CommOptions options;
  options.timeout = Milliseconds(20'000);
  options.frozen_after = Milliseconds(400);
  return options;
}

ToyTraining process_training(int zero_stage) {
  ToyTraining training;
  training.model = {.width = 40, .blocks = 4};
  training.world = kWorld;
  training.plan = zero_plan(zero_stage, {"dp"});
  return training;
}

class EngineFaults : public ::testing::TestWithParam<std::tuple<Fault, int>> {};

TEST_P(EngineFaults, EveryRankEndsInTimeAndNothingIsLeft) {
  const auto [fault, stage] = GetParam();
  const std::vector<std::string> files_before = test::shared_memory_files();
  const int descriptors_before = test::open_descriptors();
  for (int at = 1; at <= 40; at += fault == Fault::kFreeze ? 9 : 3) {
    SCOPED_TRACE("call " + std::to_string(at));
    const std::string job = test::unique_job();
    test::ForkRanksOptions options;
    options.deadline = Milliseconds(15'000);
    bool woken = false;
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds since) {
      // A frozen rank is woken after the others have given it up, so that it can find out and end as well.
      if (fault == Fault::kFreeze && !woken && since > Milliseconds(1'500)) {
        ::kill(pids[kVictim], SIGCONT);
        woken = true;
      }
      return true;
    };
    const int zero_stage = stage;
    const Fault kind = fault;
    const test::ForkReport report = test::fork_ranks(
        kWorld,
        [&](int rank) {
          ToyTraining training = process_training(zero_stage);
          training.steps = 50;
          training.decorate = [&](std::unique_ptr<CommBackend> inner, int of) -> std::unique_ptr<CommBackend> {
            if (of != kVictim) return inner;
            return std::make_unique<TripBackend>(std::move(inner), kind, at);
          };
          (void)train_toy_rank(training,
                               make_backend("shm", {.rank = rank, .size = kWorld, .job = job, .options = process_options()}));
        },
        options);
    for (const test::ProcessEnd& end : report.ends) {
      EXPECT_FALSE(end.killed_at_deadline) << "rank " << end.rank << "\n" << report.text();
    }
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank == kVictim) continue;
      const test::RankFailure* failure = report.of(rank);
      ASSERT_NE(failure, nullptr) << "rank " << rank << " ended well";
      EXPECT_TRUE(failure->text.find("PEER_LOST") != std::string::npos || failure->text.find("ABORTED") != std::string::npos)
          << failure->text;
      EXPECT_NE(failure->text.find("rank 1"), std::string::npos) << failure->text;
    }
  }
  EXPECT_EQ(test::shared_memory_files(), files_before);
  EXPECT_EQ(test::open_descriptors(), descriptors_before);
  EXPECT_EQ(test::child_processes(), 0);
}

INSTANTIATE_TEST_SUITE_P(AllFaults,
                         EngineFaults,
                         ::testing::Combine(::testing::Values(Fault::kKill, Fault::kFreeze, Fault::kExit, Fault::kThrow, Fault::kInterrupt),
                                            ::testing::Values(0, 2, 3)),
                         [](const auto& param_info) {
                           return std::string(name_of(std::get<0>(param_info.param))) + "Stage" + std::to_string(std::get<1>(param_info.param));
                         });

std::string text_of(const ToyOutcome& outcome) {
  std::string text;
  for (std::size_t step = 0; step < outcome.losses.size(); ++step) text += outcome.losses[step] + " " + outcome.norms[step] + "\n";
  return text;
}

/// Losses and norms of ranks that are processes.
std::string train_in_processes(const ToyTraining& training, const test::ForkRanksOptions& options = {}) {
  const std::string job = test::unique_job();
  const std::string path = ::testing::TempDir() + job + ".txt";
  const test::ForkReport report = test::fork_ranks(
      training.world,
      [&](int rank) {
        const ToyOutcome own = train_toy_rank(
            training, make_backend("shm", {.rank = rank, .size = training.world, .job = job, .options = process_options()}));
        if (rank == 0) std::ofstream(path) << text_of(own);
      },
      options);
  EXPECT_TRUE(report.ok()) << report.text();
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  ::unlink(path.c_str());
  return text;
}

TEST(EngineProcesses, GiveTheBitsOfThreadsAtEveryStage) {
  for (const int world : {1, 2, 3, 4}) {
    ToyTraining training = process_training(0);
    training.world = world;
    training.skip = [](int rank, std::int64_t step, int block) { return (rank + step + block) % 4 == 0; };
    const std::string expected = text_of(train_toy(training));
    for (int stage = 0; stage <= 3; ++stage) {
      training.plan = zero_plan(stage, {"dp"});
      EXPECT_EQ(train_in_processes(training), expected) << "stage " << stage << " world " << world;
    }
  }
}

TEST(EngineProcesses, SurviveShortFreezes) {
  ToyTraining training = process_training(0);
  training.steps = 300;
  const std::string expected = text_of(train_toy(training));
  training.plan = zero_plan(3, {"dp"});
  test::ForkRanksOptions options;
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
}  // namespace zeroth::testing
