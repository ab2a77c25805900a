// When an update runs: inside backward, or one step late, with the bits of a step that is whole before its update
// begins; and what happens to a step that cannot be committed.
#include "support/checkpoint_folder.h"
#include "support/covering_array.h"
#include "support/toy_training.h"
#include "toy_engine.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/io/io_queue.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16};
constexpr const char* kOptimizers[] = {"AdamW", "SGD"};

/// Changes settings behind what a training does to them already.
void set(ToyTraining& training, const std::function<void(EngineSettings&)>& change) {
  training.tamper = [before = training.tamper, change](int rank, ToyStructure& structure, EngineSettings& settings) {
    if (before) before(rank, structure, settings);
    change(settings);
  };
}

void inside_backward(ToyTraining& training) {
  set(training, [](EngineSettings& settings) { settings.update.inside_backward = true; });
}

void rest_in_files(ToyTraining& training) {
  training.plan.residency = {.optimizer = Residency::kFiles, .block_elements = 1024, .slots = 4};
  set(training, [](EngineSettings& settings) {
    settings.storage = {.folders = {std::filesystem::temp_directory_path().string()}, .stripe_bytes = 4096};
  });
}

/// How often the update of a unit began inside of a backward, over all ranks.
std::shared_ptr<std::atomic<int>> count_early(ToyTraining& training) {
  auto count = std::make_shared<std::atomic<int>>(0);
  training.at_start = [before = training.at_start, count](Engine& engine, ToyModel& model) {
    if (before) before(engine, model);
    model.set_update_watcher([count](int) { ++*count; });
  };
  return count;
}

// stage, ranks, micro-steps, dtype, residency, transport, optimizer, execution, policy, clipping
const std::vector<int> kLevels{4, 3, 2, 2, 2, 2, 2, 2, 2, 2};

ToyTraining training_of(const FactorRow& row) {
  ToyTraining training = small(row[0], row[1] + 1);
  training.steps = 4;
  training.micro_steps = row[2] == 0 ? 1 : 3;
  training.model = {
      .width = 40, .blocks = 4, .dtype = kDtypes[row[3]], .reuse_last = row[3] == 0, .tie_first_two = true};
  training.model.frozen_blocks = {2};
  training.model.round_gradients = true;
  training.transport = row[5] == 0 ? ThreadTransport::kMemory : ThreadTransport::kMessages;
  training.optimizer = kOptimizers[row[6]];
  training.plan.policy = row[8] == 0 ? ReductionPolicy::kPerMicroStep : ReductionPolicy::kPerStep;
  training.clipping = row[9] == 0 ? 0.0 : 0.1;
  if (row[9] != 0) set(training, [](EngineSettings& settings) { settings.update.clip_by = ClipBy::kPreviousNorm; });
  return training;
}

ToyTraining other_way(ToyTraining training, const FactorRow& row) {
  training.mode = row[7] == 0 ? ExecutionMode::kInline : ExecutionMode::kChaos;
  if (row[4] != 0) rest_in_files(training);
  return training;
}

std::string text_of(const FactorRow& row) {
  std::string text;
  for (const int level : row) text += std::to_string(level) + " ";
  return text;
}

void expect_the_bits_of_an_update_after_the_vote(const FactorRow& row) {
  const ToyTraining after = training_of(row);
  ToyTraining inside = other_way(after, row);
  inside_backward(inside);
  const auto early = count_early(inside);
  const ToyOutcome got = train_toy(inside);
  EXPECT_EQ(difference(train_toy(after), got), "") << text_of(row);
  for (const MemoryReport& memory : got.memory) EXPECT_EQ(memory.planned, memory.measured_peak) << to_text(memory);
  // At stage 0 sums come from other ranks, over messages in a call after backward.
  const bool none = row[0] == 0 && row[1] != 0 && row[5] != 0;
  EXPECT_TRUE(none || early->load() > 0) << text_of(row);
}

TEST(InsideBackward, HasTheBitsOfAnUpdateAfterTheVote) {
  for (const FactorRow& row : covering_array(kLevels, 2, {})) expect_the_bits_of_an_update_after_the_vote(row);
}

TEST(LongInsideBackward, HasTheBitsOfAnUpdateAfterTheVote) {
  for (const FactorRow& row : covering_array(kLevels, 3, {})) expect_the_bits_of_an_update_after_the_vote(row);
}

}  // namespace
}  // namespace zeroth::test
