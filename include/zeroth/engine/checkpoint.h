// What an engine writes into a checkpoint besides its own states, and what a load found.
#pragma once

#include <zeroth/base/deadline.h>
#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// A tensor of the caller: a buffer of the model. Row major. Rank 0's is written.
struct ExtraTensor {
  CheckpointState about{};
  std::span<const std::byte> data{};
};

/// Weights that never train, such as the model under an adapter.
enum class Frozen : std::uint8_t {
  kCopy,  ///< in each checkpoint
  kOnce,  ///< in the first checkpoint of a folder; later ones refer to it (Manifest::base)
};

struct SaveOptions {
  Retention retention{};
  std::string user{};          ///< JSON of the caller; rank 0's is written
  std::string user_of_rank{};  ///< JSON of this rank: random generators, position in the data
  std::vector<ExtraTensor> extras{};
  Frozen frozen = Frozen::kCopy;
  /// True: a checkpoint of this step that has another state is replaced; one of them is there at every moment.
  bool overwrite = false;
  /// Of a save that runs behind: the longest wait for another rank's file. A rank that has ended is noticed at once.
  Milliseconds timeout{1'800'000};
};

class SaveInFlight;

/// A save that runs behind the training; see Engine::save_async(). Copies share it. May outlive the engine, whose
/// destructor finishes the save.
class [[nodiscard]] SaveHandle {
 public:
  explicit SaveHandle(std::shared_ptr<SaveInFlight> save);

  /// The final name of the checkpoint, which is there when wait() has returned.
  [[nodiscard]] const std::string& path() const;
  /// True when the save has ended, well or not. Never blocks; ranks may differ until wait() or the next save.
  [[nodiscard]] bool done() const;
  /// Collective, blocks: the path, when the checkpoint is on the disk under it. Throws on every rank alike, once:
  /// the error of the save; if an earlier call has thrown it, the path is "". It does not wait for other ranks if an
  /// earlier call of all ranks has told how the save ended, or the engine is gone; without the engine a rank knows what
  /// it has seen itself.
  const std::string& wait();  // NOLINT(modernize-use-nodiscard): it may be called for the wait alone
  /// Blocks until the save has ended. On this rank only; tells nothing. For the end of a program.
  void finish() const;

 private:
  std::shared_ptr<SaveInFlight> save_;
};

struct LoadOptions {
  /// False: parameters and states that the checkpoint lacks keep their values, and what it has beyond the model is left
  /// out; the report lists both.
  bool strict = true;
  /// True: a folder without any checkpoint is no error; nothing is loaded, and the report's path is empty.
  bool if_any = false;
  /// False: groups keep the hyper-parameters that they have here. Those of another optimizer are never taken.
  bool hypers = true;
  /// Names that a parameter or extra tensor of this model has in the checkpoint, where it is another one.
  std::map<std::string, std::string> names{};

  [[nodiscard]] const std::string& name_there(const std::string& name) const {
    const auto found = names.find(name);
    return found == names.end() ? name : found->second;
  }
};

struct LoadedExtra {
  CheckpointState about{};
  std::vector<std::byte> data{};
};

struct LoadReport {
  std::string path{};                     ///< the checkpoint that was loaded
  Manifest manifest{};                    ///< of it
  std::vector<std::string> skipped{};     ///< newer ones that are none: path and reason
  std::vector<std::string> missing{};     ///< "blocks.3.weight/exp_avg"
  std::vector<std::string> unexpected{};  ///< parameters that the model does not have
  std::string user{};
  std::string user_of_rank{};  ///< of the rank with this one's number; "" if the worlds differ
  std::vector<LoadedExtra> extras{};
};

}  // namespace zeroth
