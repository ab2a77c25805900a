// What an engine writes into a checkpoint besides its own states, and what a load found.
#pragma once

#include <zeroth/checkpoint/folder.h>
#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// A tensor of the caller: a buffer of the model. Row major. Rank 0's is written.
struct ExtraTensor {
  CheckpointState about{};
  std::span<const std::byte> data{};
};

struct SaveOptions {
  Retention retention{};
  std::string user{};          ///< JSON of the caller; rank 0's is written
  std::string user_of_rank{};  ///< JSON of this rank: random generators, position in the data
  std::vector<ExtraTensor> extras{};
};

struct LoadOptions {
  /// False: parameters and states that the checkpoint lacks keep their values, and what it has beyond the model is left
  /// out; the report lists both.
  bool strict = true;
  /// True: a folder without any checkpoint is no error; nothing is loaded, and the report's path is empty.
  bool if_any = false;
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
