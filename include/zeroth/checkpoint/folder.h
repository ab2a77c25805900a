// Folders of checkpoints: a save that is under way, and the ones that are there.
//
// [Note: Commit] The files of a save are written and synced in "step-00000300.tmp-<run>"; then the manifest, and the
// folder; then the folder is renamed to "step-00000300" and its parent synced. Only after that a save has been. A
// reader that finds the final name finds everything. A save that ended early leaves a temporary folder, which the next
// save removes if nobody holds its lock.
//
// [Note: Order of commits] Each manifest has the number of its commit, one more than the largest one of its folder. The
// newest checkpoint is that of the last commit, not that of the largest step: a run that was rolled back, or began
// anew, saves smaller steps than are there. The number is in the file, so it survives copies.
//
// [Note: The same step again] A checkpoint of the step may be there. If it has the same state and is the newest, the
// new one is dropped. Else the two folders exchange their names in one call, and the older one goes: at every moment
// one of them has the final name. Another state needs Existing::kReplace.
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
  std::int64_t commit = 0;      ///< Manifest::commit; -1: its manifest is torn, or there is none
  std::string path{};
};

/// "step-00000300"; "step-00000300-2" after two micro-steps of the next step.
[[nodiscard]] std::string checkpoint_name(std::int64_t step, std::int64_t micro_step = 0);
/// "rank-00003.safetensors".
[[nodiscard]] std::string rank_file_name(int rank);

/// Checkpoints of a folder, the last commit first, see [Note: Order of commits]; those without a number come after, the
/// largest step first. One whose manifest is torn is in the place that its step would give it. Empty where there is no
/// such folder. Throws kIo.
[[nodiscard]] std::vector<CheckpointEntry> list_checkpoints(const std::string& folder);

/// The manifest of a checkpoint. Throws kIo, kCheckpoint.
[[nodiscard]] Manifest read_manifest(const std::string& checkpoint);

/// Path of the checkpoint that has the frozen weights of the one at `checkpoint` (whose manifest.base is not empty). It
/// has not been looked for.
[[nodiscard]] std::string base_path(const std::string& checkpoint, const Manifest& manifest);

/// The same, with its manifest. Throws kCheckpoint if it is not there, or is another save; kIo.
[[nodiscard]] std::pair<std::string, Manifest> base_of(const std::string& checkpoint, const Manifest& manifest);

/// Why a checkpoint is not whole; "" if it is: its manifest is, every file that it names is there with its size, and so
/// are those of the checkpoint that it refers to. It reads manifests only: the digests of files are not compared.
[[nodiscard]] std::string why_torn(const std::string& checkpoint);

/// Notes in a checkpoint that others are going to refer to it (Manifest::base): retention looks for them before it
/// removes it. Throws kIo.
void mark_as_base(const std::string& checkpoint);

struct Retention {
  int keep_last = 0;   ///< checkpoints that stay, those of the last commits; 0: all
  int keep_every = 0;  ///< steps whose multiples stay as well; 0: none
};

/// Removes the checkpoints that `retention` does not keep, last commits first. Those that are torn, see why_torn(), do
/// not count, and stay; so the last whole one stays, too. Nor anything with a name that is not its own goes. Returns
/// their paths, with `dry_run` those that it would remove. keep_last of 0 removes nothing. Throws kIo if the folder
/// cannot be read.
std::vector<std::string> prune_checkpoints(const std::string& folder, const Retention& retention, bool dry_run = false);

/// What becomes of a whole checkpoint of the same step, see [Note: The same step again].
enum class Existing : std::uint8_t {
  kRefuse,   ///< it stays, and the save is refused when it begins
  kSame,     ///< the save is refused when it commits, if the state is another one
  kReplace,  ///< the new one takes its place
};

/// A save that is under way, on the rank that commits it. Without commit() its folder goes with the object.
class PendingCheckpoint {
 public:
  /// Makes the folder, and its parents. Removes what saves that ended early have left. Throws kIo; with kRefuse kUsage
  /// if the step has been saved there before.
  PendingCheckpoint(const std::string& folder, std::int64_t step, std::string run, std::int64_t micro_step = 0,
                    Existing existing = Existing::kRefuse);
  PendingCheckpoint(const PendingCheckpoint&) = delete;
  PendingCheckpoint& operator=(const PendingCheckpoint&) = delete;
  ~PendingCheckpoint();

  /// Where ranks put their files.
  [[nodiscard]] const std::string& path() const { return temporary_; }
  [[nodiscard]] const std::string& final_path() const { return final_; }
  /// Checkpoints that the folder had of later steps when this save began: names, of an older run or of one that was
  /// rolled back.
  [[nodiscard]] const std::vector<std::string>& later() const { return later_; }
  /// All files are there and synced: numbers and writes the manifest and gives the folder its name. Then removes what
  /// `retention` does not keep; never the checkpoint itself, the base of one that stays, a checkpoint that it cannot
  /// read, nor anything with a name that is not its own. Returns Manifest::run of what has the name then: of an earlier
  /// save, if that has the same state. Throws kIo; kUsage for another state of a step that is there.
  std::string commit(Manifest manifest, const Retention& retention);

 private:
  std::string folder_;
  std::string run_;
  std::string temporary_;
  std::string final_;
  Existing existing_;
  std::vector<std::string> later_;
  int lock_ = -1;
  bool committed_ = false;
};

}  // namespace zeroth
