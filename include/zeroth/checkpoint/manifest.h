// Manifest: what a checkpoint holds. A folder without a whole manifest is no checkpoint.
//
//   step-00000300/           the name is the commit: it is renamed to this when all files are on the disk
//     rank-00000.safetensors tensors of one dimension: ranges of logical tensors ("blocks.0.weight/exp_avg"), with
//     where
//     ...                    they lie in __metadata__
//     manifest.json          everything else, written last
//
// Nothing in it depends on stages, flats or the number of ranks: any world reads any checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

inline constexpr int kCheckpointFormat = 1;
/// Of a checkpoint in which some parameter is not row major in memory (BoxRange::order): readers of the first format
/// would not see it.
inline constexpr int kOrderedFormat = 2;
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr std::size_t kManifestTail = 128;  ///< bytes at the end of a manifest that commit_in() reads
inline constexpr int kNoGroup = -1;                ///< of a parameter whose hyper-parameters nobody knows

/// A file, with the digest (XXH3, 64 bits) of every MiB.
struct CheckpointFile {
  std::string name{};
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> chunks{};
  bool operator==(const CheckpointFile&) const = default;
};

/// A state of a parameter: "weight", "exp_avg".
struct CheckpointState {
  std::string name{};
  std::string dtype{};                ///< of the format safetensors
  std::vector<std::int64_t> shape{};  ///< of the logical tensor
  bool operator==(const CheckpointState&) const = default;
};

struct CheckpointParam {
  std::string name{};
  std::vector<std::int64_t> shape{};  ///< of the logical tensor
  std::string dtype{};                ///< as it computes
  bool trainable = true;
  int group = 0;                       ///< of `groups`, or kNoGroup
  std::int64_t updates = 0;            ///< steps in which it was updated
  std::vector<std::string> aliases{};  ///< other names of the same tensor
  std::vector<CheckpointState> states{};
  bool operator==(const CheckpointParam&) const = default;
};

/// Another checkpoint of the same folder, which has the frozen parameters.
struct CheckpointBase {
  std::string name{};  ///< of its folder; "": there is none
  std::string run{};   ///< Manifest::run
  bool operator==(const CheckpointBase&) const = default;
};

struct Manifest {
  int format = kCheckpointFormat;
  std::string version{};  ///< of Zeroth
  std::string run{};      ///< random, one a save
  std::int64_t step = 0;
  /// Number of this commit in its folder: 1 more than the largest one there. 0: of a Zeroth that counted none.
  std::int64_t commit = 0;
  int world = 1;
  std::string plan{};
  std::string optimizer{};
  std::string configuration{};        ///< JSON, or ""
  std::vector<std::string> groups{};  ///< hyper-parameters, as JSON; doubles as hexadecimal text
  std::vector<CheckpointParam> params{};
  std::vector<CheckpointState> extras{};    ///< tensors of the caller, in the file of rank 0, whole
  CheckpointBase base{};                    ///< where weights lie that never train, and are not in the files here
  std::string accumulation{};               ///< JSON: micro-steps of a step that was under way; "" between steps
  std::string loss_scaler{};                ///< JSON, as groups; "" without a loss scale that adapts
  std::string update{};                     ///< JSON: what the next update needs of the last step; "" if nothing
  std::string local{};                      ///< JSON of local updates beside their states; "" without
  std::string user{};                       ///< JSON of the caller
  std::vector<std::string> user_of_rank{};  ///< JSON, one a rank
  std::vector<CheckpointFile> files{};      ///< one a rank
  bool operator==(const Manifest&) const = default;
};

/// JSON, with the digest of everything before it as its last member.
[[nodiscard]] std::string to_text(const Manifest& manifest);

/// Manifest::commit, as the last kManifestTail bytes of the text say it; nothing is compared. -1: they are not the end
/// of a manifest.
[[nodiscard]] std::int64_t commit_in(std::string_view tail);

/// `where`: file, for errors. Throws kCheckpoint for a text that is torn, was changed, is of a newer format, or says
/// what cannot be: sizes and names are checked before anything is made of them.
[[nodiscard]] Manifest manifest_of(const std::string& text, const std::string& where);

}  // namespace zeroth
