// Folders of checkpoints: a save that is under way, and the ones that are there.
//
// [Note: Commit] The files of a save are written and synced in "step-00000300.tmp-<run>"; then the manifest, and the
// folder; then the folder is renamed to "step-00000300" and its parent synced. Only after that a save has been. A
// reader that finds the final name finds everything. A save that ended early leaves a temporary folder, which the next
// save removes if nobody holds its lock.
#pragma once

#include <zeroth/checkpoint/manifest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

/// A checkpoint by its name; it has not been looked into.
struct CheckpointEntry {
  std::int64_t step = 0;
  std::int64_t micro_step = 0;  ///< of the step after it, that have ended; 0: it is from between steps
  std::string path{};
};

/// "step-00000300"; "step-00000300-2" after two micro-steps of the next step.
[[nodiscard]] std::string checkpoint_name(std::int64_t step, std::int64_t micro_step = 0);
/// "rank-00003.safetensors".
[[nodiscard]] std::string rank_file_name(int rank);

/// Checkpoints of a folder, the newest first; empty where there is no such folder. Throws kIo.
[[nodiscard]] std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

/// The manifest of a checkpoint. Throws kIo, kCheckpoint.
[[nodiscard]] Manifest read_manifest(const std::string& checkpoint);

/// Path of the checkpoint that has the frozen weights of the one at `checkpoint` (whose manifest.base is not empty). It
/// has not been looked for.
[[nodiscard]] std::string base_path(const std::string& checkpoint, const Manifest& manifest);

/// The same, with its manifest. Throws kCheckpoint if it is not there, or is another save; kIo.
[[nodiscard]] std::pair<std::string, Manifest> base_of(const std::string& checkpoint, const Manifest& manifest);

/// Notes in a checkpoint that others are going to refer to it (Manifest::base): retention looks for them before it
/// removes it. Throws kIo.
void mark_as_base(const std::string& checkpoint);

struct Retention {
  int keep_last = 0;   ///< newest checkpoints that stay; 0: all
  int keep_every = 0;  ///< steps whose multiples stay as well; 0: none
};

/// Removes the checkpoints that `retention` does not keep, newest steps first; never one that it cannot read, nor
/// anything with a name that is not its own. Returns their paths, with `dry_run` those that it would remove. keep_last
/// of 0 removes nothing. Throws kIo if the folder cannot be read.
std::vector<std::string> prune_checkpoints(const std::string& folder, const Retention& retention, bool dry_run = false);

/// A save that is under way, on the rank that commits it. Without commit() its folder goes with the object.
class PendingCheckpoint {
 public:
  /// Makes the folder, and its parents. Removes what saves that ended early have left. Throws kIo; kUsage if the step
  /// has been saved there before.
  PendingCheckpoint(const std::string& folder, std::int64_t step, std::string run, std::int64_t micro_step = 0);
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;
  ~PendingCheckpoint();

  /// Where ranks put their files.
  [[nodiscard]] const std::string& path() const { return temporary_; }
  [[nodiscard]] const std::string& final_path() const { return final_; }
  /// All files are there and synced: writes the manifest and gives the folder its name. Then removes what `retention`
  /// does not keep; never the base of one that stays, a checkpoint that it cannot read, nor anything with a name that
  /// is not its own. Throws kIo.
  void commit(const std::string& manifest, const Retention& retention);

 private:
  std::string folder_;
  std::string run_;
  std::string temporary_;
  std::string final_;
  int lock_ = -1;
  bool committed_ = false;
};

}  // namespace zeroth
