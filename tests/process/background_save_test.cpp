// What the threads of a save behind the training see of each other, and what a forked child must not do.
#include "engine/background_save.h"

#include "support/checkpoint_folder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

class BehindTheTraining : public ::testing::Test {
 protected:
  std::unique_ptr<BackgroundSave> make(int rank, int world, const std::string& folder,
                                       std::unique_ptr<PendingCheckpoint> pending) {
    return std::make_unique<BackgroundSave>(BackgroundSave::Terms{.folder = folder,
                                                                  .final_path = folder_.step(7),
                                                                  .run = "run",
                                                                  .rank = rank,
                                                                  .world = world,
                                                                  .file = file_,
                                                                  .timeout = Milliseconds(60'000)},
                                            std::move(pending));
  }
  static std::optional<Error> end_of(BackgroundSave& save) {
    const Deadline deadline(Milliseconds(30'000));
    while (!save.wait(kWaitSlice)) {
      if (deadline.passed()) return Error(ErrorCode::kTimeout, "the save has not ended");
    }
    return save.error();
  }
  static Manifest manifest_of_world(int world) {
    return {.run = "run",
            .step = 7,
            .world = world,
            .user_of_rank = std::vector<std::string>(static_cast<std::size_t>(world))};
  }
  CheckpointFolder folder_;
  std::vector<std::byte> file_{3'000'000, std::byte{5}};
};

TEST_F(BehindTheTraining, AForkedChildEndsWithoutTouchingIt) {
  auto pending = std::make_unique<PendingCheckpoint>(folder_.text(), 7, "run");
  const std::string path = pending->path();
  auto save = make(0, 1, path, std::move(pending));
  const pid_t child = ::fork();
  if (child == 0) {
    const bool ended = save->wait(Milliseconds(0));
    save.reset();
    ::_exit(ended ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  save->begin(manifest_of_world(1));
  const std::optional<Error> error = end_of(*save);
  EXPECT_FALSE(error) << error->what();
  EXPECT_EQ(read_manifest(folder_.step(7)).files.at(0).bytes, file_.size());
}

TEST_F(BehindTheTraining, ARankThatHasDiedIsNamedAndTheFolderGoes) {
  auto pending = std::make_unique<PendingCheckpoint>(folder_.text(), 7, "run");
  const std::string path = pending->path();
  auto first = make(0, 2, path, std::move(pending));
  std::ofstream(path + "/" + detail::rank_mark_name(1)) << "half a word";  // without a lock
  first->begin(manifest_of_world(2));
  const std::optional<Error> error = end_of(*first);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
  EXPECT_NE(std::string(error->what()).find("rank 1 of 2"), std::string::npos) << error->what();
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_TRUE(list_checkpoints(folder_.text()).empty());
}

TEST_F(BehindTheTraining, OtherRanksSeeThatTheOneThatCommitsHasDied) {
  const std::string path = folder_.text() + "/step-00000007.tmp-run";
  std::filesystem::create_directories(path);
  std::ofstream(path + "/lock") << "";  // and nobody holds it
  auto second = make(1, 2, path, nullptr);
  second->begin({});
  const std::optional<Error> error = end_of(*second);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
  EXPECT_NE(std::string(error->what()).find("rank 0"), std::string::npos) << error->what();
}

TEST_F(BehindTheTraining, ALivingRankIsAwaited) {
  auto pending = std::make_unique<PendingCheckpoint>(folder_.text(), 7, "run");
  const std::string path = pending->path();
  auto first = make(0, 2, path, std::move(pending));
  auto second = make(1, 2, path, nullptr);  // holds its lock, and is never begun
  first->begin(manifest_of_world(2));
  EXPECT_FALSE(first->wait(Milliseconds(300)));
  second->begin({});
  const std::optional<Error> error = end_of(*first);
  EXPECT_FALSE(error) << error->what();
  EXPECT_FALSE(end_of(*second));
  EXPECT_EQ(read_manifest(folder_.step(7)).files.size(), 2U);
}

TEST_F(BehindTheTraining, OneThatIsNeverBegunLeavesNothing) {
  auto pending = std::make_unique<PendingCheckpoint>(folder_.text(), 7, "run");
  const std::string path = pending->path();
  make(0, 1, path, std::move(pending)).reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace zeroth::test
