// CheckpointReader: a checkpoint as logical tensors, for one process that reads it without an engine.
#pragma once

#include <zeroth/checkpoint/box_range.h>
#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

namespace detail {
struct RankEntry;
}  // namespace detail

/// Where a part of a state lies.
struct StoredRange {
  std::string key{};    ///< "blocks.0.weight/exp_avg"; "extra/running_mean" of a tensor of the caller
  std::string dtype{};  ///< of the format safetensors
  BoxRange range{};
  std::string file{};  ///< its name; with the folder's before it if it is the base's: "step-00000010/rank-00000..."
  std::uint64_t begin = 0;  ///< bytes in the file
  std::uint64_t bytes = 0;
};

/// What is wrong with a checkpoint: bytes of a file, or elements of a state.
struct Damage {
  std::string file{};       ///< its name; "" for a state whose elements are in no file, or in two
  std::uint64_t begin = 0;  ///< bytes [begin, end) of the file; elements of the state where `file` is ""
  std::uint64_t end = 0;
  std::vector<std::string> keys{};  ///< states that lie there
  std::string what{};
};

/// Frozen weights that another checkpoint of the folder has (Manifest::base) are read from there, as if they were here.
/// Files stay open while it lives. For one thread at a time. All calls block, and throw kIo, and kCheckpoint where a
/// file is torn or its bytes are not those that were written.
class CheckpointReader {
 public:
  /// Reads the manifest and the headers of all files.
  explicit CheckpointReader(const std::string& checkpoint);
  CheckpointReader(CheckpointReader&&) noexcept;
  CheckpointReader& operator=(CheckpointReader&&) noexcept;
  ~CheckpointReader();

  [[nodiscard]] const Manifest& manifest() const;
  /// In the order of the files.
  [[nodiscard]] std::vector<StoredRange> ranges() const;
  [[nodiscard]] bool has(const std::string& key) const;
  /// Bytes of elements [begin, end) of the logical tensor, row major, whatever the order of the files. Throws kUsage
  /// for a key that is not there, a range beyond the tensor, or a span of another size; kCheckpoint if some elements
  /// are in no file.
  void read(const std::string& key, std::int64_t begin, std::int64_t end, std::span<std::byte> into);

 private:
  struct State;
  /// A range in the file of this number, which has this name.
  void add(std::size_t index, const std::string& file, detail::RankEntry entry);
  std::unique_ptr<State> state_;
};

/// Everything that is wrong with a checkpoint whose manifest is whole: every MiB of every file compared with its
/// digest, and every element of every state and tensor of the manifest is there once. A file that cannot be read is
/// damage, too. Empty: nothing. Throws what read_manifest() throws.
[[nodiscard]] std::vector<Damage> find_damage(const std::string& checkpoint);

}  // namespace zeroth
