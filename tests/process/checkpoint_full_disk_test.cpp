// A disk that is really full: a small file system of its own.
#include "process/engine_ranks.h"
#include "support/checkpoint_folder.h"
#include "support/own_file_system.h"

#include <zeroth/checkpoint/folder.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;

/// A file system of this size there, which this process alone sees. "" or why not.
std::string mount_small(const std::string& folder, std::uint64_t kib) {
  return mount_for_this_thread(FileSystemKind::kTmpfs, kib << 10U, {}, folder);
}

bool may_mount(const std::string& folder) {
  const ForkReport report = fork_ranks(1, [&](int) {
    const std::string problem = mount_small(folder, 64);
    if (!problem.empty()) throw std::runtime_error(problem);
  });
  return report.ok();
}

/// Saves after every step until the disk is full; then goes on with one checkpoint fewer.
void fill_disk(const std::string& folder, bool behind) {
  ToyTraining training = process_training(2);
  training.world = 2;
  training.steps = 12;
  training.reports_memory = false;
  training.after_step = [&, full = 0](Engine& engine, ToyModel&, const StepResult& step) mutable {
    std::string text;
    try {
      behind ? (void)engine.save_async(folder).wait() : (void)engine.save(folder);
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kIo, error.what());
      text = error.what();
    }
    engine.barrier();  // nobody looks while rank 0 still works
    if (engine.rank() == 0 && (!text.empty() || step.step == training.steps)) {
      std::size_t left = 0;
      for (const auto& entry : fs::directory_iterator(folder))
        left += entry.path().filename().string().find("tmp") != std::string::npos ? 1U : 0U;
      require(left == 0, "a temporary folder is left");
      for (const CheckpointEntry& entry : list_checkpoints(folder)) (void)read_manifest(entry.path);
    }
    if (!text.empty()) {
      ++full;
      require(text.find("No space left on device") != std::string::npos, text);
      require(text.find(folder) != std::string::npos, text);
      if (engine.rank() == 0) fs::remove_all(list_checkpoints(folder).back().path);
      engine.barrier();
      require(engine.load(folder).manifest.step == step.step - 1, "the one before");
      (void)engine.save_async(folder + "/again").wait();
      if (engine.rank() == 0) fs::remove_all(folder + "/again");
    }
    require(step.step < training.steps || full > 0, "the disk was never full");
  };
  (void)train_toy(training);
}

TEST(CheckpointFullDisk, IsNamedOnAllRanksKeepsWhatWasThereAndTrainingGoesOn) {
  const CheckpointFolder folder;
  fs::create_directories(folder.text());
  if (!may_mount(folder.text())) GTEST_SKIP() << "not permitted: a file system of its own in a mount namespace";
  for (const bool behind : {false, true}) {
    const ForkReport report = fork_ranks(1, [&](int) {
      const std::string problem = mount_small(folder.text(), 600);
      require(problem.empty(), problem);
      fill_disk(folder.text(), behind);
    });
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

}  // namespace
}  // namespace zeroth::test
