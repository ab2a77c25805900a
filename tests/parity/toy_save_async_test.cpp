// Saves that run behind the training: the checkpoint is that of the step at which it was asked for.
#include "support/checkpoint_folder.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ToyTraining odd_training(int zero_stage, int world, DType dtype) {
  ToyTraining training = small(zero_stage, world);
  training.model.dtype = dtype;
  training.model.frozen_blocks = {1};
  training.model.tie_first_two = true;
  training.model.round_gradients = dtype == DType::kBFloat16;
  training.reports_memory = false;
  return training;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Bytes of the ranks' files of a step.
std::vector<std::string> files_of_step(const CheckpointFolder& folder, std::int64_t step) {
  std::vector<std::string> files;
  for (const CheckpointFile& file : read_manifest(folder.step(step)).files)
    files.push_back(text_of_file(folder.step(step) + "/" + file.name));
  return files;
}

TEST(SaveAsync, HasTheBytesOfABlockingSaveOfThatStepWhateverIsTrainedMeanwhile) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [stage, world] : {std::pair{0, 1}, {1, 2}, {2, 3}, {3, 3}}) {
      const CheckpointFolder folder;
      const CheckpointFolder blocking;
      ToyTraining training = odd_training(stage, world, dtype);
      training.steps = 3;
      const std::vector<float> buffer{1, 2, 3};
      training.after_step = [&](Engine& engine, ToyModel&, const StepResult&) {
        const SaveOptions options{.user = "{}",
                                  .user_of_rank = std::to_string(engine.rank()),
                                  .extras = {{.about = {.name = "mean", .dtype = "F32", .shape = {3}},
                                              .data = std::as_bytes(std::span(buffer))}}};
        (void)engine.save_async(folder.text(), options);
        (void)engine.save(blocking.text(), options);
      };
      const ToyOutcome outcome = train_toy(training);
      ToyTraining without = training;
      without.after_step = {};
      EXPECT_EQ(difference(train_toy(without), outcome), "");
      for (int step = 1; step <= training.steps; ++step) {
        ASSERT_TRUE(files_of_step(folder, step) == files_of_step(blocking, step)) << stage << " " << world;
        Manifest manifest = read_manifest(folder.step(step));
        manifest.run = read_manifest(blocking.step(step)).run;
        EXPECT_EQ(manifest, read_manifest(blocking.step(step)));
      }
    }
  }
}

TEST(SaveAsync, IsNotChangedByLaterStepsAndIsThereWhenTheEngineIsGone) {
  const CheckpointFolder folder;
  const CheckpointFolder blocking;
  ToyTraining training = odd_training(3, 2, DType::kFloat32);
  std::vector<SaveHandle> handles(2, SaveHandle({}));
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 3) (void)engine.save(blocking.text());
    if (result.step == 3) handles[static_cast<std::size_t>(engine.rank())] = engine.save_async(folder.text());
  };
  (void)train_toy(training);
  for (SaveHandle& handle : handles) {
    EXPECT_TRUE(handle.done());
    EXPECT_EQ(handle.wait(), folder.step(3));
  }
  EXPECT_EQ(files_of_step(folder, 3), files_of_step(blocking, 3));
  EXPECT_THAT(folder.names(), ElementsAre("LATEST", "step-00000003"));
}

TEST(SaveAsync, KeepsItsCopyForTheNextAndReportsIt) {
  const CheckpointFolder folder;
  ToyTraining training = odd_training(2, 2, DType::kFloat32);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step == 1) require(engine.memory_report().checkpoint_copy == 0, "no copy before the first");
    const std::string path = engine.save_async(folder.text()).wait();
    const std::uint64_t file = std::filesystem::file_size(path + "/" + rank_file_name(engine.rank()));
    const MemoryReport report = engine.memory_report();
    require(report.checkpoint_copy >= file && report.checkpoint_copy < file + 2 * kPageBytes, "the size of the copy");
    require(to_text(report).find("copy for checkpoints") != std::string::npos, to_text(report));
  };
  (void)train_toy(training);
}

TEST(SaveAsync, AnEarlierOneIsWaitedForByLoadAndTheStepHasOneState) {
  const CheckpointFolder folder;
  ToyTraining training = odd_training(1, 3, DType::kFloat32);
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    (void)engine.save_async(folder.text(), {.retention = {.keep_last = 2}});
    if (result.step != 4) return;
    const std::string path = engine.save_async(folder.text()).wait();
    require(read_manifest(path).step == 4, "the same state again");
    try {
      (void)engine.save_async(folder.text(), {.user = "1"}).wait();
      require(false, "another state has taken the place of the first");
    } catch (const Error& error) {
      require(std::string(error.what()).find("has been saved there before") != std::string::npos, error.what());
    }
    require(engine.load(folder.text()).manifest.step == 4, "the one that ran behind");
  };
  (void)train_toy(training);
  EXPECT_THAT(folder.names(), ElementsAre("LATEST", "step-00000005", "step-00000006"));
}

TEST(SaveAsync, OfSomethingThatCannotBeIsRefusedAtOnceOnAllRanks) {
  ToyTraining training = odd_training(1, 2, DType::kFloat32);
  const std::vector<std::byte> three(3);
  const CheckpointFolder folder;
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    if (result.step != 1) return;
    for (const auto& [path, extras, expected] :
         {std::tuple{std::string("/proc/none"), std::vector<ExtraTensor>{}, "could not be begun"},
          {folder.text(),
           {{.about = {.name = "odd", .dtype = "F32", .shape = {1}}, .data = three}},
           "bytes that do not fit it"}}) {
      std::string text;
      try {
        (void)engine.save_async(path, {.extras = extras});
      } catch (const Error& error) {
        text = error.what();
      }
      EXPECT_THAT(text, HasSubstr(expected));
    }
  };
  (void)train_toy(training);
}

}  // namespace
}  // namespace zeroth::test
