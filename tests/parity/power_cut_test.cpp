// Power cuts: after any call of a save, whatever a disk may have kept, every checkpoint that was acknowledged is there,
// and none is half there. The calls are those of the real writer and the real commit; the disk is a model.
#include "checkpoint/rank_file.h"
#include "support/crash_states.h"
#include "support/recorded_files.h"
#include "support/thread_ranks.h"
#include "toy_engine.h"

#include <zeroth/checkpoint/folder.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace zeroth::test {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 4;

/// In memory where there is some: states are made by the thousand.
class Scratch {
 public:
  Scratch() {
    std::error_code error;
    const fs::path memory = "/dev/shm";
    path_ = (fs::is_directory(memory, error) ? memory : fs::temp_directory_path()) /
            ("zeroth-power-cut-" + std::to_string(::getpid()));
    fs::create_directories(path_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { fs::remove_all(path_); }
  [[nodiscard]] std::string at(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

/// All calls of a training of two ranks that saves after each step; the folder is new. `twice`: each checkpoint takes
/// the place of one of the same step. Acknowledged is the step, times ten, and which of them.
std::vector<FileOp> record(const Scratch& scratch, bool behind, int keep_last, bool twice = false) {
  fs::create_directories(scratch.at("live"));
  FileRecording recording(scratch.at("live"));
  ToyTraining training;
  training.model = {.width = 8, .blocks = 1};
  training.plan = zero_plan(2, {"dp"});
  training.world = 2;
  training.steps = kSteps;
  training.reports_memory = false;
  const std::string folder = scratch.at("live") + "/runs/a";
  training.after_step = [&](Engine& engine, ToyModel&, const StepResult& result) {
    for (int time = 1; time <= (twice ? 2 : 1); ++time) {
      const SaveOptions options{
          .retention = {.keep_last = keep_last}, .user = std::to_string(time), .overwrite = time == 2};
      if (behind) {
        (void)engine.save_async(folder, options).wait();
      } else {
        (void)engine.save(folder, options);
      }
      if (engine.rank() == 0) recording.acknowledge(result.step * 10 + time);
    }
  };
  (void)train_toy(training);
  std::vector<FileOp> ops = recording.take();
  fs::remove_all(scratch.at("live"));
  return ops;
}

/// What is wrong with the state; "" if nothing is.
std::string fault_of(const std::string& folder, std::int64_t acknowledged) {
  std::int64_t newest = 0;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    Manifest manifest;
    try {
      manifest = read_manifest(entry.path);
    } catch (const Error&) {
      continue;  // none
    }
    try {
      for (const CheckpointFile& about : manifest.files) {
        detail::KnownFile file(entry.path, about);
        std::vector<std::byte> bytes(static_cast<std::size_t>(about.bytes));
        file.read(0, bytes);
        (void)detail::read_header(file);
      }
    } catch (const Error& error) {
      return std::string("half there: ") + error.what();
    }
    newest = std::max(newest, manifest.step * 10 + std::stoi(manifest.user));
  }
  if (newest < acknowledged)
    return "lost: " + std::to_string(acknowledged) + " was acknowledged, " + std::to_string(newest) + " is there";
  return "";
}

/// States after random calls. Returns the first fault, with its seed; "" if all are well.
std::string first_fault(const Scratch& scratch, const std::vector<FileOp>& ops, int states, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::string disk = scratch.at("disk");
  for (int state = 0; state < states; ++state) {
    const std::size_t calls = random() % (ops.size() + 1);
    const std::uint64_t state_seed = random();
    const auto before = std::span(ops).first(calls);
    std::int64_t acknowledged = 0;
    for (const FileOp& op : before) {
      if (op.kind == FileOp::Kind::kAcknowledge) acknowledged = static_cast<std::int64_t>(op.offset);
    }
    make_crash_state(before, scratch.at("live"), state_seed, disk);
    std::string fault = fault_of(disk + "/runs/a", acknowledged);
    if (fault.empty() && state % 10 == 0) {
      // The run that goes on can save there, and what it finds stays.
      {
        const PendingCheckpoint pending(disk + "/runs/a", 99, "next");
      }
      fault = fault_of(disk + "/runs/a", acknowledged);
    }
    fs::remove_all(disk);
    if (!fault.empty())
      return fault + " (seed " + std::to_string(seed) + ", state " + std::to_string(state) + ", after call " +
             std::to_string(calls) + " of " + std::to_string(ops.size()) + ")";
  }
  return "";
}

TEST(PowerCut, LosesNoAcknowledgedCheckpointAndLeavesNoneHalf) {
  constexpr int kStates = 2'000;
  const Scratch scratch;
  std::uint64_t seed = 1;
  for (const bool behind : {false, true}) {
    for (const int keep_last : {0, 1, 2}) {
      const std::vector<FileOp> ops = record(scratch, behind, keep_last);
      ASSERT_GE(std::ranges::count(ops, FileOp::Kind::kAcknowledge, &FileOp::kind), kSteps);
      EXPECT_EQ(first_fault(scratch, ops, kStates / 6 + 1, seed++), "") << behind << " " << keep_last;
    }
    const std::vector<FileOp> ops = record(scratch, behind, /*keep_last=*/1, /*twice=*/true);
    ASSERT_EQ(std::ranges::count(ops, FileOp::Kind::kExchange, &FileOp::kind), kSteps);
    EXPECT_EQ(first_fault(scratch, ops, kStates / 6 + 1, seed++), "") << behind << " twice";
  }
}

/// A protocol that is wrong, as a change of the calls of the right one.
struct Mutant {
  const char* name;
  std::function<std::vector<FileOp>(std::vector<FileOp>)> change;
};

bool is_checkpoint(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  return name.starts_with("step-") && name.find('.') == std::string::npos;
}

/// Moves each call that `early` picks to before the first earlier one that `late` picks, in the same save.
std::vector<FileOp> moved(std::vector<FileOp> ops, const std::function<bool(const FileOp&)>& early,
                          const std::function<bool(const FileOp&)>& late) {
  for (std::size_t at = 0; at < ops.size(); ++at) {
    if (!early(ops[at])) continue;
    std::size_t begin = at;
    while (begin > 0 && ops[begin - 1].kind != FileOp::Kind::kAcknowledge) --begin;
    const auto first = std::find_if(ops.begin() + static_cast<std::ptrdiff_t>(begin),
                                    ops.begin() + static_cast<std::ptrdiff_t>(at), late);
    std::rotate(first, ops.begin() + static_cast<std::ptrdiff_t>(at),
                ops.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  return ops;
}

TEST(PowerCut, CatchesWrongProtocols) {
  const auto is_commit = [](const FileOp& op) { return op.kind == FileOp::Kind::kRename && is_checkpoint(op.to); };
  const auto in_folder = [](const FileOp& op, const char* end) {
    return op.kind == FileOp::Kind::kSync && op.path.ends_with(end);
  };
  const std::vector<Mutant> mutants{
      {"files are not synced",
       [&](std::vector<FileOp> ops) {
         std::erase_if(ops, [&](const FileOp& op) { return in_folder(op, ".safetensors"); });
         return ops;
       }},
      {"the manifest is not synced",
       [&](std::vector<FileOp> ops) {
         std::erase_if(ops, [&](const FileOp& op) { return in_folder(op, "manifest.json"); });
         return ops;
       }},
      {"the folder is renamed before the manifest is written",
       [&](std::vector<FileOp> ops) {
         // The manifest is then written under the final name.
         std::vector<FileOp> changed = moved(std::move(ops), is_commit, [](const FileOp& op) {
           return op.kind == FileOp::Kind::kMakeFile && op.path.ends_with("manifest.json");
         });
         std::map<std::string, std::string> names;
         for (FileOp& op : changed) {
           if (is_commit(op)) names[op.path] = op.to;
           for (const auto& [from, to] : names) {
             if (op.path.starts_with(from) && !is_commit(op)) op.path = to + op.path.substr(from.size());
           }
         }
         // Acknowledged, as it would be, when the folder has been synced, before the manifest is.
         return moved(
             std::move(changed), [](const FileOp& op) { return op.kind == FileOp::Kind::kAcknowledge; },
             [](const FileOp& op) { return op.kind == FileOp::Kind::kMakeFile && op.path.ends_with("manifest.json"); });
       }},
      {"the folder of checkpoints is not synced before it is acknowledged",
       [&](std::vector<FileOp> ops) {
         std::erase_if(ops, [&](const FileOp& op) { return in_folder(op, "/runs/a"); });
         return ops;
       }},
      {"the temporary folder is not synced",
       [&](std::vector<FileOp> ops) {
         std::erase_if(ops, [&](const FileOp& op) {
           return op.kind == FileOp::Kind::kSync && fs::path(op.path).filename().string().starts_with("step-");
         });
         return ops;
       }},
      {"old ones are removed before the commit",
       [&](std::vector<FileOp> ops) {
         const auto removes = [](const FileOp& op) {
           return (op.kind == FileOp::Kind::kRename && is_checkpoint(op.path)) ||
                  (op.kind == FileOp::Kind::kSync && op.path.ends_with("/runs/a"));
         };
         return moved(std::move(ops), removes, is_commit);
       }},
  };
  const Scratch scratch;
  const std::vector<FileOp> ops = record(scratch, /*behind=*/false, /*keep_last=*/1);
  EXPECT_EQ(first_fault(scratch, ops, 200, 11), "");
  for (const Mutant& mutant : mutants) {
    EXPECT_NE(first_fault(scratch, mutant.change(ops), 400, 12), "") << "not caught: " << mutant.name;
  }
}

}  // namespace
}  // namespace zeroth::test
