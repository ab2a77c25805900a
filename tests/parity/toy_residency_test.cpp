// States in files: the bits of states in memory at every stage, memory and disk as planned, and checkpoints that do not
// know where a state rested.
#include "toy_residency.h"

#include "support/checkpoint_folder.h"
#include "support/own_file_system.h"

#include <zeroth/base/failpoint.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// But for copies that ranks make beyond the plan when they wait long for each other, on a busy machine (spills).
void expect_memory_as_planned(const MemoryReport& memory, const std::string& text) {
  MemorySnapshot measured = memory.measured_peak;
  if (memory.spills > 0) measured.bytes[static_cast<std::size_t>(MemoryState::kOverflow)] = 0;
  EXPECT_EQ(memory.planned, measured) << text << "\n" << to_text(memory);
  EXPECT_EQ(memory.planned_files, memory.measured_files) << text;
}

void expect_the_bits_of_memory(const FactorRow& row) {
  ToyTraining resident = training_of(row);
  resident.steps = 3;  // of which the second is the first to read what an update wrote
  const ToyOutcome expected = train_toy(resident);
  const ToyOutcome got = train_toy(in_files(resident, row));
  std::string text = "factors";
  for (const int level : row) text += " " + std::to_string(level);
  EXPECT_EQ(difference(expected, got), "") << text;
  const bool optimizer = row[10] != kParameters && kRatios[row[4]] > 0.0;
  const bool parameters = row[10] != kOptimizerStates;
  for (std::size_t rank = 0; rank < got.memory.size(); ++rank) {
    const MemoryReport& memory = got.memory[rank];
    expect_memory_as_planned(memory, text);
    EXPECT_EQ(memory.planned_files > 0, optimizer || parameters) << text;
    if (optimizer && kRatios[row[4]] == 1.0) {
      EXPECT_EQ(memory.planned[MemoryState::kOptimizer] + memory.planned[MemoryState::kMaster], 0U) << text;
    }
    if (parameters) {
      EXPECT_EQ(memory.planned[MemoryState::kParameter], 0U) << text;
    }
    EXPECT_EQ(got.planned_wire[rank].total(), expected.planned_wire[rank].total()) << text;
    EXPECT_EQ(got.gather_bytes[rank], expected.gather_bytes[rank]) << text;
  }
}

TEST(Residency, StatesInFilesHaveTheBitsOfStatesInMemory) {
  for (const FactorRow& row : covering_array(kResidencyLevels, 2, {})) expect_the_bits_of_memory(row);
}

TEST(LongResidency, StatesInFilesHaveTheBitsOfStatesInMemory) {
  for (const FactorRow& row : covering_array(kResidencyLevels, 3, {})) expect_the_bits_of_memory(row);
}

// The same of every stage, number of ranks and of micro-steps, time of the update, engine, and choice of what rests in
// files.
TEST(LongResidency, EveryCombinationHasTheBitsOfStatesInMemory) {
  constexpr std::pair<Filed, double> kFiled[] = {
      {kOptimizerStates, 1.0}, {kOptimizerStates, 0.5}, {kParameters, 1.0}, {kBoth, 0.5}};
  for (const FactorRow& row : covering_array({4, 3, 2, 2}, 4, {})) {  // stage, ranks, micro-steps, inside backward
    FactorRow factors{row[0], row[1], row[2], 1, 0, 1, 0, 0, 0, 0, 0, 0};
    ToyTraining resident = training_of(factors);
    resident.steps = 3;
    resident.reports_memory = false;
    resident = with_settings(resident, [inside = row[3] == 1](EngineSettings& settings) {
      settings.update = {.inside_backward = inside, .clip_by = ClipBy::kPreviousNorm};
    });
    const ToyOutcome expected = train_toy(resident);
    for (const auto& [filed, ratio] : kFiled) {
      for (const IoEngineKind engine : {IoEngineKind::kThreads, IoEngineKind::kAio, IoEngineKind::kAuto}) {
        factors[10] = filed;
        ToyTraining training = with_settings(in_files(resident, factors),
                                             [engine](EngineSettings& settings) { settings.storage.engine = engine; });
        training.plan.residency.optimizer_ratio = ratio;
        EXPECT_EQ(difference(expected, train_toy(training)), "")
            << "stage " << row[0] << ", " << row[1] + 1 << " ranks, " << training.micro_steps << " micro-steps, "
            << (row[3] == 1 ? "inside backward" : "after the vote") << ", files " << filed << ", ratio " << ratio
            << ", " << name_of(engine);
      }
    }
  }
}

std::uint64_t memory_of(const ToyOutcome& outcome) {
  std::uint64_t bytes = 0;
  for (const MemoryReport& report : outcome.memory) bytes += report.planned.total();
  return bytes;
}

TEST(Residency, APlannedRatioKeepsInMemoryWhatFitsAndHasTheSameBits) {
  for (const int ranks : {1, 3}) {
    const FactorRow one{2, ranks - 1, 0, 1, 0, 1, 0, 0, 0, 0, kOptimizerStates, 0};
    const ToyOutcome expected = train_toy(training_of(one));
    ToyTraining planned = in_files(training_of(one), one);
    const std::uint64_t least = memory_of(train_toy(planned));
    planned.plan.residency.plans_ratio = true;
    for (const double share : {0.0, 0.5, 2.0}) {
      const std::uint64_t most = memory_of(expected);
      ASSERT_LT(least, most);
      const std::uint64_t limit = least + static_cast<std::uint64_t>(share * static_cast<double>(most - least));
      const ToyOutcome got =
          train_toy(with_settings(planned, [limit](EngineSettings& settings) { settings.memory_limit_bytes = limit; }));
      const std::string text = std::to_string(ranks) + " ranks, " + std::to_string(share) + " of the way";
      EXPECT_EQ(difference(expected, got), "") << text;
      EXPECT_LE(memory_of(got), limit) << text;
      for (const MemoryReport& memory : got.memory) {
        EXPECT_EQ(memory.planned, memory.measured_peak) << text << "\n" << to_text(memory);
        EXPECT_EQ(memory.planned_files, memory.measured_files) << text;
        EXPECT_EQ(memory.planned_files > 0, share < 1.0) << text << ": " << memory.residency_choice;
        EXPECT_EQ(memory.residency_choice, got.memory.front().residency_choice) << text;
        EXPECT_THAT(to_text(memory), HasSubstr(share < 1.0 ? "rest in files" : "stay in memory")) << text;
      }
    }
  }
}

TEST(Residency, FilesThatOneRankCannotMeasureAreAnErrorOfAllRanksThatNamesIt) {
  const FactorRow one{1, 1, 0, 1, 0, 1, 0, 0, 0, 0, kOptimizerStates, 0};
  ToyTraining training = in_files(training_of(one), one);
  training.plan.residency.plans_ratio = true;
  training.tamper = [before = training.tamper](int rank, ToyStructure& structure, EngineSettings& settings) {
    before(rank, structure, settings);
    if (rank == 1) settings.storage.folders = {"/nowhere/at/all"};
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[IO] files could not be measured"), HasSubstr("rank 1/2"),
                                          HasSubstr("/nowhere/at/all"), HasSubstr("set offload_optimizer.ratio")));
}

TEST(Residency, ACacheOverFilesHasTheBitsOfMemoryAndThePlannedBytes) {
  for (const int ratio : {0, 1}) {
    const FactorRow one{3, 1, 1, 1, ratio, 0, 0, 0, 0, 1, ratio == 0 ? kOptimizerStates : kBoth, 0};
    const ToyOutcome expected = train_toy(training_of(one));
    ToyTraining cached = in_files(training_of(one), one);
    const std::uint64_t without = memory_of(train_toy(cached));
    cached.plan.residency.cache_blocks = 3;
    const ToyOutcome got = train_toy(cached);
    EXPECT_EQ(difference(expected, got), "");
    EXPECT_GT(memory_of(got), without);
    for (const MemoryReport& memory : got.memory) EXPECT_EQ(memory.planned, memory.measured_peak) << to_text(memory);
  }
}

TEST(Residency, APlanOverTheBudgetOfATierIsRefusedWithTheTableOfWhoWantsWhat) {
  const FactorRow one{1, 1, 0, 1, 1, 1, 0, 0, 0, 0, kOptimizerStates, 0};
  const ToyTraining filed = in_files(training_of(one), one);
  const auto refusal = [&](const TierBudget& budget) {
    return message_of(with_settings(filed, [budget](EngineSettings& settings) { settings.budget = budget; }));
  };
  EXPECT_THAT(refusal({.file_bytes = 5000}),
              AllOf(HasSubstr("[OUT_OF_MEMORY] the plan goes over the budget of a tier"), HasSubstr("rank "),
                    HasSubstr("/zeroth/budget/file_bytes"), HasSubstr("at most 4.88 KiB of files"),
                    HasSubstr("too much"), HasSubstr("state              device         host        files"),
                    HasSubstr("optimizer"), HasSubstr("staging"), HasSubstr("sum"), HasSubstr("ratio below 1")));
  EXPECT_THAT(refusal({.host_bytes = 5000, .file_bytes = 1U << 30U}),
              AllOf(HasSubstr("/zeroth/budget/host_bytes"), HasSubstr("free"), HasSubstr("smaller buffer_count")));
  EXPECT_THAT(refusal({.device_bytes = 5000}),
              AllOf(HasSubstr("/zeroth/budget/device_bytes"), HasSubstr("higher zero_optimization.stage")));
  const auto saves = with_settings(filed, [](EngineSettings& settings) {
    settings.budget.host_bytes = 1U << 20U;
    settings.activations = {.folders = settings.storage.folders, .piece_bytes = 1U << 20U, .slots = 2};
  });
  EXPECT_THAT(message_of(saves), AllOf(HasSubstr("/zeroth/budget/host_bytes"), HasSubstr("staging")));
  const ToyOutcome fits = train_toy(with_settings(filed, [](EngineSettings& settings) {
    settings.budget = {.device_bytes = 1U << 20U, .host_bytes = 1U << 20U, .file_bytes = 1U << 20U};
  }));
  EXPECT_EQ(difference(train_toy(training_of(one)), fits), "");
}

TEST(Residency, CheckpointsGoFromAndToFiles) {
  for (const int dtype : {0, 1, 2}) {
    for (const bool saves_in_files : {true, false}) {
      const CheckpointFolder folder;
      const FactorRow one{2, 1, 0, dtype, 0, 1, 0, 0, 0, 0, kBoth, 0};
      ToyTraining whole = training_of(one);
      whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
        if (result.step == 3) (void)engine.save(folder.text());
      };
      const ToyOutcome expected = train_toy(saves_in_files ? in_files(whole, one) : whole);
      // Another stage, half of the optimizer's states in memory.
      const FactorRow other{3, 1, 0, dtype, 1, 0, 1, 0, 1, 1, kBoth, 1};
      ToyTraining resumed = training_of(other);
      resumed.first_step = 3;
      resumed.model_seed = 99;
      resumed.at_start = [&](Engine& engine, ToyModel&) { (void)engine.load(folder.text()); };
      const ToyOutcome got = train_toy(saves_in_files ? resumed : in_files(resumed, other));
      EXPECT_EQ(got.values, expected.values)
          << (saves_in_files ? "from files, " : "to files, ") << name_of(kDtypes[dtype]);
    }
  }
}

TEST(Residency, PlansWithDegreesHaveTheirBitsFromFilesToo) {
  for (const ShardingPlan& plan : {hpz_plan(2, {"dp"}), hsdp_plan(2, {"dp"})}) {
    const FactorRow row{3, 3, 0, 1, 0, 0, 0, 0, 0, 0, kBoth, 0};
    ToyTraining resident = training_of(row);
    resident.plan = plan;
    resident.steps = 3;
    const ToyOutcome expected = train_toy(resident);
    const ToyOutcome got = train_toy(in_files(resident, row));
    EXPECT_EQ(difference(expected, got), "") << plan.name;
    for (const MemoryReport& memory : got.memory) expect_memory_as_planned(memory, plan.name);
  }
}

TEST(Residency, RanksThatUseOtherUnitsNeedThemAllInTheirOwnFiles) {
  for (const int stage : {0, 1, 3}) {
    const FactorRow row{stage, 1, 0, 0, 0, 0, 0, 0, 0, 0, kBoth, 0};
    ToyTraining resident = training_of(row);
    resident.skip = random_paths(5);
    const ToyTraining filed = in_files(resident, row);
    if (stage < 3) {
      EXPECT_EQ(difference(train_toy(resident), train_toy(filed)), "") << stage;
    } else {  // gathers are calls of all ranks
      EXPECT_THAT(message_of(filed), AllOf(HasSubstr("[MISMATCH]"), HasSubstr("blocks.")));
    }
  }
}

TEST(Residency, WeightsInFilesAreReadAndWrittenByName) {
  for (const int dtype : {0, 1, 2}) {
    const FactorRow row{3, 1, 0, dtype, 0, 0, 0, 0, 0, 0, kBoth, 1};
    ToyTraining resident = training_of(row);
    resident.after_step = [](Engine& engine, ToyModel&, const StepResult& result) {
      if (result.step == 2) engine.add_average("ema");
      if (result.step > 2) engine.update_average("ema", 0.5);
      if (result.step != 4) return;
      engine.swap_average("ema");
      engine.swap_average("ema");
    };
    resident.reports_memory = false;
    EXPECT_EQ(difference(train_toy(resident), train_toy(in_files(resident, row))), "") << name_of(kDtypes[dtype]);
  }
}

TEST(Residency, AFailedTransferEndsTheStepOnAllRanksWithTheStatesThatItWasOf) {
  for (const char* site : {"io.threads.transfer@hit=1:errno=EIO", "io.threads.transfer@hit=40:errno=EIO"}) {
    const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 0, 0, kOptimizerStates, 0};
    ToyTraining training = in_files(training_of(row), row);
    training.after_step = [site](Engine& engine, ToyModel&, const StepResult& result) {
      if (result.step == 2 && engine.rank() == 0) arm_failpoints(parse_failpoints(site), 0);
    };
    const std::string text = message_of(training);
    disarm_failpoints();
    EXPECT_THAT(text, AllOf(HasSubstr("[IO]"), HasSubstr("Input/output error"), HasSubstr("states of unit"),
                            HasSubstr("elements ["), HasSubstr("offset")))
        << site;
  }
}

// Nothing but the wait for the transfer can throw here: local_states() talks to no rank.
TEST(Residency, ARankThatWaitsForADiskLooksAfterTheOthers) {
  const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 0, 0, kOptimizerStates, 0};
  ToyTraining training = in_files(training_of(row), row);
  std::string heard = "nothing";
  training.after_step = [&heard](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step < 2) return;
    if (engine.rank() == 1) throw Error(ErrorCode::kUsage, "rank 1 has had enough");
    arm_failpoints(parse_failpoints("io.threads.transfer:sleep=200"), 0);
    heard = text_thrown_by([&engine] { (void)engine.local_states("exp_avg"); });
    disarm_failpoints();
    throw Error(ErrorCode::kUsage, "so has rank 0");
  };
  EXPECT_THAT(message_of(training), HasSubstr("rank 1 has had enough"));
  EXPECT_THAT(heard, HasSubstr("rank 1 has had enough"));
}

/// Rank 0's states rest on a file system of `bytes`.
ToyTraining on_disk_of_rank_0(const std::string& folder) {
  const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 1, 0, kOptimizerStates, 0};
  ToyTraining training = in_files(training_of(row), row);
  const auto before = training.tamper;
  training.tamper = [before, folder](int rank, ToyStructure& structure, EngineSettings& settings) {
    before(rank, structure, settings);
    if (rank == 0) settings.storage.folders = {folder};
  };
  return training;
}

TEST(Residency, ADiskThatGoesAwayEndsTheJobWithFileOffsetAndStates) {
  const std::string problem = on_own_file_system(FileSystemKind::kExt4, 16U << 20U, [](const std::string& folder) {
    ToyTraining training = on_disk_of_rank_0(folder);
    training.after_step = [&folder](Engine& engine, ToyModel&, const StepResult& result) {
      if (result.step == 2 && engine.rank() == 0) {
        EXPECT_TRUE(shut_down_ext4(folder));
      }
    };
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("[IO]"), HasSubstr("Input/output error"), HasSubstr(folder),
                                            HasSubstr("states of unit"), HasSubstr("offset")));
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

TEST(Residency, ADiskThatIsTooSmallIsAnErrorBeforeTheFirstStep) {
  const std::string problem = on_own_file_system(FileSystemKind::kTmpfs, 64U << 10U, [](const std::string& folder) {
    ToyTraining training = on_disk_of_rank_0(folder);
    training.at_start = [](Engine&, ToyModel&) { ADD_FAILURE() << "there is an engine"; };
    EXPECT_THAT(message_of(training),
                AllOf(HasSubstr("[IO] the folders of files have no room"), HasSubstr("who: rank 0/2"),
                      HasSubstr("which: " + folder), HasSubstr("free, for 1 rank"), HasSubstr("got: 64.0 KiB free")));
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

TEST(Residency, AFailedReadOfAParameterEndsTheStepWithUnitAndName) {
  const FactorRow row{3, 1, 0, 0, 0, 0, 0, 0, 0, 0, kParameters, 1};
  ToyTraining training = in_files(training_of(row), row);
  // In a backward all writes of the update before are over: what fails is a read.
  training.visitor = [](CommBackend& backend) {
    return [rank = backend.rank(), uses = 0](bool backward, int unit) mutable {
      if (rank == 0 && backward && unit == 4 && ++uses == 3)
        arm_failpoints(parse_failpoints("io.threads.transfer@hit=1:errno=EIO"), 0);
    };
  };
  const std::string text = message_of(training);
  disarm_failpoints();
  EXPECT_THAT(text,
              AllOf(HasSubstr("[IO] a read failed: Input/output error"), HasSubstr("parameters of unit "),
                    HasSubstr("elements ["), HasSubstr("offset"), AnyOf(HasSubstr(".weight"), HasSubstr(".bias"))));
}

TEST(Residency, AWorkingSetThatHasNoRoomForAUnitIsRefusedWithTheNumbers) {
  const FactorRow row{3, 0, 0, 0, 0, 0, 0, 0, 0, 0, kParameters, 1};
  ToyTraining training = in_files(training_of(row), row);
  training.plan.residency.parameter_elements = 5 * 1024;
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("[CONFIG]"), HasSubstr("unit root has 6 blocks of at most 1024"),
                                          HasSubstr("at least 6144 elements"), HasSubstr("5120")));
}

TEST(Residency, FoldersThatCannotBeAreRefusedByName) {
  const FactorRow row{1, 0, 0, 0, 0, 0, 0, 0, 0, 0, kOptimizerStates, 0};
  ToyTraining training = in_files(training_of(row), row);
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.storage.folders = {"/nowhere/at/all"};
  };
  EXPECT_THAT(message_of(training),
              AllOf(HasSubstr("[IO]"), HasSubstr("No such file or directory"),
                    HasSubstr("which: /zero_optimization/offload_optimizer/nvme_path"),
                    HasSubstr("got: /nowhere/at/all"), HasSubstr("hint: mkdir -p /nowhere/at/all")));
  training.tamper = {};
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("have no folder"), HasSubstr("offload_optimizer/nvme_path")));
  training.plan.residency = {.parameter = Residency::kFiles};
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("have no folder"), HasSubstr("offload_param/nvme_path")));
}

}  // namespace
}  // namespace zeroth::test
