// States in files: the bits of states in memory at every stage, memory and disk as planned, and checkpoints that do not
// know where a state rested.
#include "support/checkpoint_folder.h"
#include "support/covering_array.h"
#include "support/own_file_system.h"
#include "support/toy_training.h"
#include "toy_engine.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/io/io_queue.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr double kRatios[] = {1.0, 0.5, 0.0};
constexpr int kSlots[] = {2, 3, 6};
constexpr IoEngineKind kEngines[] = {IoEngineKind::kThreads, IoEngineKind::kAuto};
constexpr const char* kOptimizers[] = {"AdamW", "SGD"};

ToyTraining training_of(const FactorRow& row) {
  ToyTraining training = small(row[0], row[1] + 1);
  training.micro_steps = row[2] == 0 ? 1 : 3;
  training.model = {.width = 70, .blocks = 4, .dtype = kDtypes[row[3]]};  // a block has 4,970 parameters
  training.model.frozen_blocks = {1};
  training.model.tie_first_two = true;
  training.model.round_gradients = size_of(training.model.dtype) == 2;
  training.optimizer = kOptimizers[row[7]];
  training.transport = row[6] == 0 ? ThreadTransport::kMemory : ThreadTransport::kMessages;
  const bool scales = training.model.dtype == DType::kFloat16;
  training.tamper = [scales](int, ToyStructure&, EngineSettings& settings) {
    if (scales) settings.loss_scaling = {.enabled = true, .initial_power = 4, .window = 1};
  };
  return training;
}

ToyTraining in_files(ToyTraining training, const FactorRow& row) {
  training.mode = row[9] == 0 ? ExecutionMode::kInline : ExecutionMode::kChaos;
  training.plan.residency = {.optimizer = Residency::kFiles,
                             .optimizer_ratio = kRatios[row[4]],
                             .block_elements = 1024,
                             .slots = kSlots[row[5]]};
  const auto before = training.tamper;
  const IoEngineKind engine = kEngines[row[8]];
  training.tamper = [before, engine](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    settings.storage = {
        .folders = {std::filesystem::temp_directory_path().string()}, .engine = engine, .stripe_bytes = 4096};
  };
  return training;
}

void expect_the_bits_of_memory(const FactorRow& row) {
  const ToyTraining resident = training_of(row);
  const ToyOutcome expected = train_toy(resident);
  const ToyOutcome got = train_toy(in_files(resident, row));
  const std::string text = "stage " + std::to_string(row[0]) + ", " + std::to_string(row[1] + 1) + " ranks, ratio " +
                           std::to_string(kRatios[row[4]]) + ", " + std::to_string(kSlots[row[5]]) + " slots";
  EXPECT_EQ(difference(expected, got), "") << text;
  for (std::size_t rank = 0; rank < got.memory.size(); ++rank) {
    const MemoryReport& memory = got.memory[rank];
    EXPECT_EQ(memory.planned, memory.measured_peak) << text << "\n" << to_text(memory);
    EXPECT_EQ(memory.planned_files, memory.measured_files) << text;
    EXPECT_EQ(memory.planned_files > 0, kRatios[row[4]] > 0.0) << text;
    if (kRatios[row[4]] == 1.0) {
      EXPECT_EQ(memory.planned[MemoryState::kOptimizer] + memory.planned[MemoryState::kMaster], 0U) << text;
    }
  }
}

// stage, ranks, micro-steps, dtype, ratio, slots, transport, optimizer, engine, execution
const std::vector<int> kLevels{4, 3, 2, 3, 3, 3, 2, 2, 2, 2};

TEST(Residency, StatesInFilesHaveTheBitsOfStatesInMemory) {
  for (const FactorRow& row : covering_array(kLevels, 2, {})) expect_the_bits_of_memory(row);
}

TEST(LongResidency, StatesInFilesHaveTheBitsOfStatesInMemory) {
  for (const FactorRow& row : covering_array(kLevels, 3, {})) expect_the_bits_of_memory(row);
}

TEST(Residency, CheckpointsGoFromAndToFiles) {
  for (const int dtype : {0, 1, 2}) {
    for (const bool saves_in_files : {true, false}) {
      const CheckpointFolder folder;
      const FactorRow one{2, 1, 0, dtype, 0, 1, 0, 0, 0, 0};
      ToyTraining whole = training_of(one);
      whole.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
        if (result.step == 3) (void)engine.save(folder.text());
      };
      const ToyOutcome expected = train_toy(saves_in_files ? in_files(whole, one) : whole);
      const FactorRow other{3, 1, 0, dtype, 1, 0, 1, 0, 1, 1};  // another stage, half in memory
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

TEST(Residency, AFailedTransferEndsTheStepOnAllRanksWithTheStatesThatItWasOf) {
  for (const char* site : {"io.threads.transfer@hit=1:errno=EIO", "io.threads.transfer@hit=40:errno=EIO"}) {
    ToyTraining training = in_files(training_of({1, 1, 0, 0, 0, 0, 0, 0, 0, 0}), {1, 1, 0, 0, 0, 0, 0, 0, 0, 0});
    training.after_step = [site](Engine& engine, ToyModel&, const StepResult& result) {
      if (result.step == 2 && engine.rank() == 0) arm_failpoints(parse_failpoints(site), 0);
    };
    const std::string text = message_of(training);
    disarm_failpoints();
    EXPECT_THAT(text, AllOf(HasSubstr("[IO]"), HasSubstr("Input/output error"), HasSubstr("states of unit"),
                            HasSubstr("elements [")))
        << site;
  }
}

// Nothing but the wait for the transfer can throw here: local_states() talks to no rank.
TEST(Residency, ARankThatWaitsForADiskLooksAfterTheOthers) {
  const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 0, 0};
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
  const FactorRow row{1, 1, 0, 0, 0, 0, 0, 0, 1, 0};
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
    EXPECT_THAT(message_of(training), AllOf(HasSubstr("No space left on device"), HasSubstr(folder), HasSubstr("free"),
                                            HasSubstr("expected: ")));
  });
  if (!problem.empty()) GTEST_SKIP() << problem;
}

TEST(Residency, FoldersThatCannotBeAreRefusedByName) {
  ToyTraining training = in_files(training_of({1, 0, 0, 0, 0, 0, 0, 0, 0, 0}), {1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  training.tamper = [](int, ToyStructure&, EngineSettings& settings) {
    settings.storage.folders = {"/nowhere/at/all"};
  };
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("No such file or directory")));
  training.tamper = {};
  EXPECT_THAT(message_of(training), AllOf(HasSubstr("have no folder"), HasSubstr("nvme_path")));
}

}  // namespace
}  // namespace zeroth::test
