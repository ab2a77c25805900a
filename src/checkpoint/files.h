// Files of a checkpoint: written with a digest of every chunk, read with each chunk compared.
#pragma once

#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth::detail {

inline constexpr std::size_t kChunkBytes = std::size_t{1} << 20U;
/// In the temporary folder of a save; the rank that commits holds a lock on it.
inline constexpr const char* kLockFile = "lock";

/// Throws kIo with errno, the path and what was tried.
[[noreturn]] void fail_io(const char* what, const std::string& path, const char* hint = "");

/// Digests of the chunks of a stream of bytes.
class ChunkDigests {
 public:
  void add(std::span<const std::byte> data);
  /// Of the last chunk, too.
  [[nodiscard]] std::vector<std::uint64_t> finish();

 private:
  std::vector<std::byte> open_;  ///< the begin of a chunk that is not whole
  std::vector<std::uint64_t> digests_;
};

/// A new file. All calls block and throw kIo.
class NewFile {
 public:
  /// `bytes`: its final size, for which there must be room.
  NewFile(std::string path, std::uint64_t bytes);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();

  void write(std::span<const std::byte> data);
  /// Syncs and closes it. A file that could not be synced is not tried again.
  [[nodiscard]] CheckpointFile finish();

 private:
  std::string path_;
  std::uint64_t expected_;
  std::uint64_t written_ = 0;
  int fd_ = -1;
  ChunkDigests digests_;
};

/// A file of a checkpoint, opened for reading. Never follows a link, never opens what is no regular file.
class KnownFile {
 public:
  /// Throws kIo, and kCheckpoint for a file of another size than the manifest says.
  KnownFile(const std::string& folder, CheckpointFile file);
  KnownFile(KnownFile&& other) noexcept;
  KnownFile& operator=(KnownFile&&) = delete;
  KnownFile(const KnownFile&) = delete;
  KnownFile& operator=(const KnownFile&) = delete;
  ~KnownFile();

  [[nodiscard]] const CheckpointFile& file() const { return file_; }
  /// Reads whole chunks, compares them with the manifest and keeps the last one. Throws kIo, and kCheckpoint with the
  /// file and the chunk whose bytes are others. Ascending offsets read every chunk once.
  void read(std::uint64_t offset, std::span<std::byte> into);

 private:
  void load(std::size_t chunk);

  std::string path_;
  CheckpointFile file_;
  int fd_ = -1;
  std::vector<std::byte> chunk_;
  std::size_t loaded_ = ~std::size_t{0};
};

/// The whole of a small file, at most `most` bytes. Throws kIo, and kCheckpoint for one that is larger.
[[nodiscard]] std::string read_small_file(const std::string& path, std::uint64_t most);

/// Syncs a folder, so that names in it last. Throws kIo.
void sync_folder(const std::string& path);

}  // namespace zeroth::detail
