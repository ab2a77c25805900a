// A training is killed again and again, at moments and system calls drawn from a seed: a checkpoint that was
// acknowledged is never lost, one that is not whole is never loaded, and the run that ends has the bits of the one that
// nobody killed. And every system call of a save fails once.
#include "process/engine_ranks.h"
#include "support/checkpoint_folder.h"
#include "support/tier.h"

#include <zeroth/base/failpoint.h>
#include <zeroth/checkpoint/folder.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr int kSteps = 12;

/// What the ranks tell the test, in memory that both see: it survives whatever kills them.
struct Board {
  std::atomic<std::int64_t> acknowledged{0};  ///< the newest step of which rank 0 knows that it was saved
  std::atomic<std::int64_t> begun{0};         ///< saves
};

class SharedBoard {
 public:
  SharedBoard()
      : board_(new(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board) {}
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }
  Board* operator->() const { return board_; }

 private:
  Board* board_;
};

using Folder = CheckpointFolder;

ToyTraining training_of(int zero_stage, int world) {
  ToyTraining training = process_training(zero_stage);
  training.model = {.width = 12, .blocks = 3};
  training.world = world;
  training.steps = kSteps;
  training.reports_memory = false;
  return training;
}

std::string values_text(const ToyOutcome& outcome) {
  std::string text;
  for (const std::vector<double>& values : outcome.values) {
    for (const double value : values) text += std::to_string(value) + " ";
  }
  return text;
}

enum class Saving { kBlocks, kBehind, kBehindAndWaits };

/// From the newest checkpoint to the end, with a save after every step. Writes the values at the end to `result`.
void train_and_save(ToyTraining training, Saving saving, int rank, const std::string& job, const std::string& folder,
                    Board* board, const std::string& result) {
  std::signal(SIGINT, SIG_DFL);
  const WorldSpec spec{.rank = rank, .size = training.world, .job = job, .options = process_options()};
  std::unique_ptr<CommBackend> backend = make_backend("shm", spec);
  std::int64_t first = 0;
  // Where it begins follows from what is there; the same on all ranks, since nobody saves yet.
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    try {
      first = read_manifest(entry.path).step;
      break;
    } catch (const Error& error) {
      std::fprintf(stderr, "a checkpoint under its final name is not whole: %s\n", error.what());
      std::abort();
    }
  }
  training.first_step = static_cast<int>(first);
  training.at_start = [&](Engine& engine, ToyModel&) {
    const LoadReport report = engine.load(folder, {.if_any = true});
    require(report.path.empty() ? first == 0 : report.manifest.step == first, "the checkpoint that was loaded");
    require(report.skipped.empty(), "a checkpoint under its final name is not whole");
  };
  std::vector<SaveHandle> handles;
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& step) {
    if (rank == 0) ++board->begun;
    const SaveOptions options{.retention = {.keep_last = 2}};
    if (saving == Saving::kBlocks) {
      (void)engine.save(folder, options);
      if (rank == 0) board->acknowledged = step.step;
      return;
    }
    // The one before is on the disk when it has been waited for, or the next could begin.
    if (saving == Saving::kBehindAndWaits && !handles.empty()) {
      (void)handles.back().wait();
      if (rank == 0) board->acknowledged = step.step - 1;
    }
    handles.push_back(engine.save_async(folder, options));
    if (rank == 0 && handles.size() > 1) board->acknowledged = step.step - 1;
    if (step.step == kSteps && saving == Saving::kBehindAndWaits) {
      (void)handles.back().wait();
      if (rank == 0) board->acknowledged = step.step;
    }
  };
  const ToyOutcome outcome = train_toy_rank(training, std::move(backend));
  if (rank == 0) std::ofstream(result) << values_text(outcome);
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

constexpr const char* kSites[] = {"checkpoint.mkdir", "checkpoint.open",   "checkpoint.reserve", "checkpoint.write",
                                  "checkpoint.sync",  "checkpoint.rename", "checkpoint.folder",  "checkpoint.close"};

/// Kills until `kills` have been, in as many trainings as that takes.
void expect_nothing_is_lost(int kills, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int done = 0; done < kills;) {
    const int stage = static_cast<int>(random() % 4);
    const int world = 1 + static_cast<int>(random() % 3);
    const auto saving = static_cast<Saving>(random() % 3);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", kill " + std::to_string(done) + ", stage " +
                 std::to_string(stage) + ", " + std::to_string(world) + " ranks, saving " +
                 std::to_string(static_cast<int>(saving)));
    const Folder folder;
    const std::string result = folder.text() + ".txt";
    const SharedBoard board;
    const ToyTraining training = training_of(stage, world);
    const std::string expected = values_text(train_toy(training));
    for (int lives = 0; lives < 40; ++lives) {
      const bool spared = lives > 8 || done >= kills;
      const int victim = static_cast<int>(random() % static_cast<unsigned>(world));
      const bool everybody = random() % 2 == 0;
      const auto at = std::chrono::microseconds(1'000 + random() % 20'000);
      const std::int64_t saves = 1 + static_cast<std::int64_t>(random() % 3);
      const std::int64_t begun_before = board->begun;
      // At a moment, or at a system call of a save.
      const std::string site = kSites[random() % std::size(kSites)];
      const std::string rule = site + "@hit=" + std::to_string(1 + random() % 6) + ":kill";
      const bool at_call = !spared && random() % 3 == 0;
      ForkRanksOptions options;
      options.deadline = kHangs;
      bool killed = at_call;
      if (!spared && !at_call) {
        options.meanwhile = [&](const std::vector<pid_t>& pids, Milliseconds since) {
          if (board->begun < begun_before + saves && since < Milliseconds{2'000}) return true;
          std::this_thread::sleep_for(at % std::chrono::microseconds(3'000));
          for (std::size_t rank = 0; rank < pids.size(); ++rank) {
            if (everybody || static_cast<int>(rank) == victim) ::kill(pids[rank], SIGKILL);
          }
          killed = true;
          return false;
        };
      }
      const std::string job = unique_job();
      const ForkReport report = fork_ranks(
          world,
          [&](int rank) {
            if (at_call && (everybody || rank == victim)) arm_failpoints(parse_failpoints(rule), rank);
            train_and_save(training, saving, rank, job, folder.text(), board.operator->(), result);
          },
          options);
      expect_nobody_hung(report);
      done += killed && !report.ok() ? 1 : 0;
      const std::vector<CheckpointEntry> there = list_checkpoints(folder.text());
      const std::int64_t newest = there.empty() ? 0 : read_manifest(there.front().path).step;
      ASSERT_GE(newest, board->acknowledged.load()) << "a checkpoint that was acknowledged is gone";
      if (report.ok()) break;
      ASSERT_FALSE(spared) << report.text();
    }
    ASSERT_EQ(text_of_file(result), expected) << "the run that went on is another one";
    ::unlink(result.c_str());
  }
}

TEST(CheckpointKills, LoseNothingThatWasAcknowledged) {
  expect_nothing_is_lost(20, 1);
}

TEST(Long, CheckpointKillsLoseNothingThatWasAcknowledged) {
  expect_nothing_is_lost(200, 2);
}

/// One rank of two fails in one system call of a save.
TEST(CheckpointFailures, OfEverySystemCallAreNamedOnAllRanksAndLeaveWhatWasThere) {
  for (const auto& [site, only_first_rank] : {std::pair{"checkpoint.mkdir", true},
                                              {"checkpoint.open", false},
                                              {"checkpoint.reserve", false},
                                              {"checkpoint.write", false},
                                              {"checkpoint.sync", false},
                                              {"checkpoint.close", false},
                                              {"checkpoint.folder", true},
                                              {"checkpoint.rename", true}}) {
    for (const char* const error : {"EIO", "ENOSPC"}) {
      SCOPED_TRACE(std::string(site) + " " + error);
      const Folder folder;
      const int failing = only_first_rank ? 0 : 1;
      ToyTraining training = training_of(2, 2);
      training.steps = 3;
      training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
        if (result.step != 2) {
          (void)engine.save(folder.text());
          return;
        }
        if (engine.rank() == failing) arm_failpoints(parse_failpoints(std::string(site) + ":errno=" + error), failing);
        std::string text;
        try {
          (void)engine.save(folder.text());
        } catch (const Error& caught) {
          require(caught.code() == ErrorCode::kIo, caught.what());
          text = caught.what();
        }
        disarm_failpoints();
        require(text.find("rank " + std::to_string(failing)) != std::string::npos, "who: " + text);
        require(text.find(folder.text()) != std::string::npos, "where: " + text);
      };
      const std::string job = unique_job();
      const ForkReport report = fork_ranks(2, [&](int rank) { train_as_rank(training, rank, job); });
      EXPECT_TRUE(report.ok()) << report.text();
      std::vector<std::int64_t> steps;
      for (const CheckpointEntry& entry : list_checkpoints(folder.text())) {
        EXPECT_EQ(read_manifest(entry.path).step, entry.step);
        steps.push_back(entry.step);
      }
      // Where only the folder could not be synced, the name is there already.
      EXPECT_TRUE(steps == (std::vector<std::int64_t>{3, 1}) || std::string(site) == "checkpoint.folder");
      for (const auto& entry : fs::directory_iterator(folder.text()))
        EXPECT_EQ(entry.path().string().find(".tmp-"), std::string::npos) << entry.path();
    }
  }
}

/// One rank of two fails behind the training.
TEST(CheckpointFailures, BehindTheTrainingComeUpOnAllRanksAtALaterStepAndTrainingGoesOn) {
  const std::string expected = values_text(train_toy(training_of(2, 2)));
  for (const auto& [site, failing] : {std::pair{"checkpoint.open", 1},
                                      {"checkpoint.reserve", 1},
                                      {"checkpoint.write", 1},
                                      {"checkpoint.write", 0},
                                      {"checkpoint.sync", 1},
                                      {"checkpoint.close", 1},
                                      {"checkpoint.folder", 0},
                                      {"checkpoint.rename", 0}}) {
    SCOPED_TRACE(std::string(site) + " on rank " + std::to_string(failing));
    const Folder folder;
    const std::string result = folder.text() + ".txt";
    ToyTraining training = training_of(2, 2);
    std::vector<SaveHandle> handles;
    training.after_step = [&, site = std::string(site), failing = failing](Engine& engine, ToyModel&,
                                                                           const StepResult& step) {
      if (step.step == 1) (void)engine.save_async(folder.text()).wait();
      if (step.step == 2) {
        if (engine.rank() == failing) arm_failpoints(parse_failpoints(site + ":errno=ENOSPC"), failing);
        handles.push_back(engine.save_async(folder.text()));
        while (!handles.back().done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        disarm_failpoints();
      }
      // The vote of the third step has told everybody: the next call raises it, and none after that.
      if (step.step == 3) {
        std::string text;
        try {
          (void)engine.step();
        } catch (const Error& caught) {
          require(caught.code() == ErrorCode::kIo, caught.what());
          text = caught.what();
        }
        require(text.find("rank " + std::to_string(failing)) != std::string::npos, "who: " + text);
        require(text.find(folder.text()) != std::string::npos, "where: " + text);
        require(text.find("No space left on device") != std::string::npos, "why: " + text);
        require(handles.at(0).wait().empty(), "raised once");
      }
      if (step.step == 4) (void)engine.save_async(folder.text());  // the destructor finishes it
      if (step.step == 4) require(engine.committed_steps() == 4, "training goes on");
    };
    const std::string job = unique_job();
    const ForkReport report = fork_ranks(2, [&](int rank) {
      const WorldSpec spec{.rank = rank, .size = training.world, .job = job, .options = process_options()};
      const ToyOutcome outcome = train_toy_rank(training, make_backend("shm", spec));
      if (rank == 0) std::ofstream(result) << values_text(outcome);
    });
    EXPECT_TRUE(report.ok()) << report.text();
    EXPECT_EQ(text_of_file(result), expected);
    ::unlink(result.c_str());
    std::vector<std::string> names = folder.names();
    std::erase(names, "step-00000002");  // where only the folder could not be synced, the name is there
    EXPECT_EQ(names, (std::vector<std::string>{"LATEST", "step-00000001", "step-00000004"}));
  }
}

TEST(CheckpointFailures, OfALoadChangeNothingOnAnyRank) {
  const Folder folder;
  ToyTraining training = training_of(3, 2);
  training.steps = 2;
  training.after_step = [&](Engine& engine, ToyModel& model, const StepResult& result) {
    if (result.step == 1) return (void)engine.save(folder.text());
    for (const char* const site : {"checkpoint.reopen", "checkpoint.read"}) {
      std::vector<std::vector<double>> before;
      const auto values = [&] {
        std::vector<std::vector<double>> all;
        for (int param = 0; param < static_cast<int>(model.structure().params.size()); ++param)
          all.push_back(model.value(param));
        return all;
      };
      before = values();
      if (engine.rank() == 1) arm_failpoints(parse_failpoints(std::string(site) + ":errno=EIO"), 1);
      std::string text;
      try {
        (void)engine.load(folder.text());
      } catch (const Error& caught) {
        require(caught.code() == ErrorCode::kIo, caught.what());
        text = caught.what();
      }
      disarm_failpoints();
      require(text.find("nothing was changed") != std::string::npos, text);
      require(text.find("rank 1 of 2") != std::string::npos, text);
      require(before == values() && engine.committed_steps() == 2, "a load that failed has changed something");
    }
    (void)engine.load(folder.text());
    require(engine.committed_steps() == 1, "and then it is loaded");
  };
  const std::string job = unique_job();
  const ForkReport report = fork_ranks(2, [&](int rank) { train_as_rank(training, rank, job); });
  EXPECT_TRUE(report.ok()) << report.text();
}

}  // namespace
}  // namespace zeroth::test
