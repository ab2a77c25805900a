// A rank is killed, frozen or interrupted in every phase of a step and at random moments, at every stage: the others
// end in time with an error that names it, and nothing is left.
#include "process/engine_ranks.h"
#include "support/tier.h"

#include <zeroth/comm/decorators.h>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <functional>
#include <new>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace zeroth::test {
namespace {

/// Named by where they begin; each lasts until the next.
enum class Phase {
  kOutside,       // before the first
  kConstruction,  // the engine is about to be built
  kForward,
  kBackward,   // in the middle of it, before a gradient is handed over
  kReduction,  // waits until all gradients of the step are summed
  kJudge,      // about to tell the others what it saw
  kVerdict,    // has the verdict of all, has not begun the update
  kUpdate,     // some microseconds later
  kPublish,    // about to wake the others for the new parameters
  kBetween,    // after a step
};

constexpr std::array kPhaseNames{"Outside", "Construction", "Forward", "Backward", "Reduction",
                                 "Judge",   "Verdict",      "Update",  "Publish",  "Between"};

constexpr const char* name_of(Phase phase) {
  return kPhaseNames[static_cast<std::size_t>(phase)];
}

/// Where each rank is, in memory that parent and ranks share.
class Places {
 public:
  Places() : memory_(::mmap(nullptr, sizeof(All), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    all_ = new (memory_) All;
  }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;
  ~Places() { ::munmap(memory_, sizeof(All)); }

  void enter(int rank, Phase phase) {
    Place& place = at(rank);
    if (phase == Phase::kForward) ++place.steps;
    place.phase = phase;
  }
  [[nodiscard]] Phase phase(int rank) { return at(rank).phase; }
  [[nodiscard]] bool all_have_reached(Phase phase) const {
    return std::ranges::all_of(*all_, [phase](const Place& place) { return place.phase >= phase; });
  }
  /// Steps that were begun.
  [[nodiscard]] int steps(int rank) { return at(rank).steps; }

 private:
  struct Place {
    std::atomic<Phase> phase{Phase::kOutside};
    std::atomic<int> steps{0};
  };
  using All = std::array<Place, kWorld>;
  [[nodiscard]] Place& at(int rank) { return (*all_)[static_cast<std::size_t>(rank)]; }

  void* memory_;
  All* all_;
};

using Enter = std::function<void(int rank, Phase phase)>;

/// Knows the phases inside Engine::step() by the calls that it makes to its transport.
class PhaseBackend final : public ForwardingBackend {
 public:
  PhaseBackend(std::unique_ptr<CommBackend> inner, Enter enter)
      : ForwardingBackend(std::move(inner)), enter_(std::move(enter)) {}

  void wait_until(const std::function<bool()>& predicate, const WaitContext& context) override {
    if (context.what == "the gradients of this step") {
      summing_ = true;
      enter_(rank(), Phase::kReduction);
    }
    inner().wait_until(predicate, context);
  }
  Work submit(std::span<const Collective> collectives, const Stream& stream) override {
    if (!summing_) return inner().submit(collectives, stream);
    enter_(rank(), Phase::kJudge);
    Work work = inner().submit(collectives, stream);
    work.wait();
    summing_ = false;
    updating_ = true;
    enter_(rank(), Phase::kVerdict);
    return work;
  }
  void notify() override {
    if (std::exchange(updating_, false)) enter_(rank(), Phase::kPublish);
    inner().notify();
  }

 private:
  Enter enter_;
  bool summing_ = false;
  bool updating_ = false;
};

/// The training of one rank, with a call of `enter` at the beginning of each phase.
ToyTraining with_phases(int stage, const Enter& enter) {
  ToyTraining training = process_training(stage);
  training.model = {.width = 200,
                    .blocks = 4};  // an update of a hundred microseconds and more, a step of some milliseconds
  training.steps = 1'000'000;
  training.tamper = [enter](int rank, ToyStructure&, EngineSettings&) { enter(rank, Phase::kConstruction); };
  training.skip = [enter](int rank, std::int64_t, int block) {
    if (block == 0) enter(rank, Phase::kForward);
    return false;
  };
  training.poison = [enter](int rank, std::int64_t, int, int param) {
    constexpr int kBiasOfTheSecondBlock = 6;
    if (param == kBiasOfTheSecondBlock) enter(rank, Phase::kBackward);
    return false;
  };
  training.decorate = [enter](std::unique_ptr<CommBackend> inner, int) -> std::unique_ptr<CommBackend> {
    return std::make_unique<PhaseBackend>(std::move(inner), enter);
  };
  training.after_step = [enter](Engine& engine, ToyModel&, const StepResult&) {
    enter(engine.rank(), Phase::kBetween);
  };
  return training;
}

/// The alarm clock of a victim strikes in the middle of whatever it is doing.
void strike_at_alarm(Fault fault, int microseconds) {
  ::signal(
      SIGALRM, fault == Fault::kFreeze      ? [](int) { ::raise(SIGSTOP); }
               : fault == Fault::kInterrupt ? [](int) { ::raise(SIGINT); }
                                            : [](int) { ::raise(SIGKILL); });
  const itimerval once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_usec = microseconds}};
  ::setitimer(ITIMER_REAL, &once, nullptr);
}

class EnginePhases : public ::testing::TestWithParam<std::tuple<Fault, int>> {
 protected:
  /// One job whose rank 1 is struck in a phase of its third step (or when it is built); returns where it was when it
  /// ended or froze.
  static Phase strike_in(Phase wanted, Fault fault, int stage) {
    constexpr int kVictim = 1;
    Places places;
    const Enter enter = [&, fault = fault](int rank, Phase phase) {
      places.enter(rank, phase);
      const bool armed = places.steps(rank) == (wanted == Phase::kConstruction ? 0 : 3);
      if (rank != kVictim || !armed) return;
      if (phase == wanted) strike(fault);
      if (phase == Phase::kVerdict && wanted == Phase::kUpdate) {
        places.enter(rank, Phase::kUpdate);
        strike_at_alarm(fault, 20);
      }
    };
    const ToyTraining training = with_phases(stage, enter);
    Phase place = Phase::kOutside;
    ForkRanksOptions options{.deadline = kHangs};
    if (fault == Fault::kFreeze) {
      options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
        place = places.phase(kVictim);
        return wait_to_wake(pids, kVictim);
      };
    }
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(kWorld, [&](int rank) { train_as_rank(training, rank, job); }, options);
    expect_victim_is_named(report, fault, kVictim);
    return fault == Fault::kFreeze ? place : places.phase(kVictim);
  }
};

TEST_P(EnginePhases, AFaultInAnyPhaseEndsEveryRankInTime) {
  const auto [fault, stage] = GetParam();
  int turn = stage + (fault == Fault::kKill ? 0 : fault == Fault::kFreeze ? 1 : 2);
  for (const Phase phase : {Phase::kConstruction, Phase::kForward, Phase::kBackward, Phase::kReduction, Phase::kJudge,
                            Phase::kVerdict, Phase::kUpdate, Phase::kPublish, Phase::kBetween}) {
    // A third in `make test`: each fault in each phase at some stage, and each stage in each phase by some fault.
    if (turn++ % 3 != 0 && !in_long_tier()) continue;
    SCOPED_TRACE(name_of(phase));
    Phase struck = Phase::kOutside;
    // An alarm may be late on a busy machine, and then strike after the update: again.
    for (int attempt = 0; attempt < (phase == Phase::kUpdate ? 5 : 1) && struck != phase; ++attempt) {
      struck = strike_in(phase, fault, stage);
    }
    EXPECT_EQ(struck, phase) << "struck in " << name_of(struck);
  }
}

const auto kFaultsAtStages = ::testing::Combine(::testing::Values(Fault::kKill, Fault::kFreeze, Fault::kInterrupt),
                                                ::testing::Values(0, 1, 2, 3));

std::string name_of_case(const ::testing::TestParamInfo<std::tuple<Fault, int>>& info) {
  return std::string(name_of(std::get<0>(info.param))) + "Stage" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(AllStages, EnginePhases, kFaultsAtStages, name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, EnginePhases, kFaultsAtStages, name_of_case);

/// A job that gets a signal from outside, some microseconds after all its ranks have reached `from`.
struct Blow {
  std::uint64_t seed = 0;
  Fault fault = Fault::kKill;
  bool everybody = false;  ///< as Ctrl-C in a terminal does; else one rank
  Phase from = Phase::kForward;
};

class EngineMoments : public ::testing::TestWithParam<int> {
 protected:
  void strike_from_outside(const Blow& blow) {
    SCOPED_TRACE(std::string(name_of(blow.fault)) + (blow.everybody ? " of all ranks" : "") + ", seed " +
                 std::to_string(blow.seed));
    std::mt19937_64 random(blow.seed);
    const int victim = static_cast<int>(random() % kWorld);
    const auto delay = static_cast<useconds_t>(random() % 12'000);
    Places places;
    const ToyTraining training = with_phases(GetParam(), [&](int rank, Phase phase) { places.enter(rank, phase); });
    bool struck = false;
    ForkRanksOptions options{.deadline = kHangs};
    options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds) {
      if (struck) return wait_to_wake(pids, victim);
      if (!places.all_have_reached(blow.from)) return true;
      ::usleep(delay);
      for (int rank = 0; rank < kWorld; ++rank) {
        if (blow.everybody || rank == victim) ::kill(pids[static_cast<std::size_t>(rank)], signal_of(blow.fault));
      }
      struck = true;
      ++hits_[static_cast<std::size_t>(places.phase(victim))];
      return blow.fault == Fault::kFreeze;
    };
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(kWorld, [&](int rank) { train_as_rank(training, rank, job); }, options);
    EXPECT_TRUE(struck) << report.text();
    if (blow.everybody) {
      expect_nobody_hung(report);
      EXPECT_EQ(report.failures.size(), static_cast<std::size_t>(kWorld)) << report.text();
    } else {
      expect_victim_is_named(report, blow.fault, victim);
    }
  }

  /// Where the victims were, for whoever reads the report.
  void TearDown() override {
    for (std::size_t phase = 0; phase < hits_.size(); ++phase) RecordProperty(kPhaseNames[phase], hits_[phase]);
  }

 private:
  std::array<int, kPhaseNames.size()> hits_{};
};

/// So many from the first one on; in `make test` a quarter, other ones at each stage, and odd ones as well as even
/// ones.
std::vector<std::uint64_t> seeds(std::uint64_t first, std::uint64_t count) {
  std::vector<std::uint64_t> chosen;
  const auto stage = static_cast<std::uint64_t>(EngineMoments::GetParam());
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    if (in_long_tier() || seed / (count < 8 ? 1 : 2) % 4 == stage) chosen.push_back(seed);
  }
  return chosen;
}

TEST_P(EngineMoments, AKilledRankIsNamed) {
  for (const std::uint64_t seed : seeds(0, 20)) strike_from_outside({.seed = seed});
}

TEST_P(EngineMoments, ARankKilledWhileTheEngineIsBuiltIsNamed) {
  for (const std::uint64_t seed : seeds(100, 12)) strike_from_outside({.seed = seed, .from = Phase::kConstruction});
}

TEST_P(EngineMoments, AnInterruptedRankIsNamed) {
  for (const std::uint64_t seed : seeds(200, 12)) strike_from_outside({.seed = seed, .fault = Fault::kInterrupt});
}

TEST_P(EngineMoments, AFrozenRankIsNamed) {
  for (const std::uint64_t seed : seeds(300, 4)) strike_from_outside({.seed = seed, .fault = Fault::kFreeze});
}

TEST_P(EngineMoments, CtrlCEndsAllRanks) {
  for (const std::uint64_t seed : seeds(400, 10)) {
    strike_from_outside({.seed = seed,
                         .fault = Fault::kInterrupt,
                         .everybody = true,
                         .from = seed % 2 == 0 ? Phase::kForward : Phase::kConstruction});
  }
}

INSTANTIATE_TEST_SUITE_P(Stage, EngineMoments, ::testing::Range(0, 4), ::testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Long, EngineMoments, ::testing::Range(0, 4), ::testing::PrintToStringParamName());

}  // namespace
}  // namespace zeroth::test
