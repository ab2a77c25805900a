// Files of a checkpoint: written with a digest of every chunk, read with each chunk compared.
#pragma once

#include "checkpoint/block_writer.h"

#include <zeroth/checkpoint/manifest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth::detail {

inline constexpr std::size_t kChunkBytes = std::size_t{1} << 20U;
/// In the temporary folder of a save; the rank that commits holds a lock on it.
inline constexpr const char* kLockFile = "lock";

/// Throws kIo with errno, the path and what was tried.
[[noreturn]] void fail_io(const char* what, const std::string& path, const char* hint = "");

/// Memory at a multiple of 4 KiB.
struct FreeBytes {
  void operator()(std::byte* bytes) const noexcept { std::free(bytes); }  // NOLINT(cppcoreguidelines-no-malloc)
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeBytes>;

/// A new file. All calls block and throw kIo.
///
/// [Note: Direct writes] Files of at least a MiB are written around the page cache (O_DIRECT) where the file system
/// takes that, in blocks of 4 MiB by a thread of their own, while the next block is filled and its digests are made.
/// The end, which is no whole block of the disk, goes through the cache. Two blocks of memory, whatever the size.
class NewFile {
 public:
  /// `bytes`: its final size, for which there must be room.
  NewFile(std::string path, std::uint64_t bytes);
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile();

  /// The next bytes; they may be changed when it returns.
  void write(std::span<const std::byte> data);
  /// The next bytes, which stay as they are until finish() has returned. Not copied where they begin at a multiple of
  /// 4 KiB of memory and of the file.
  void write_kept(std::span<const std::byte> data);
  /// Syncs and closes it. A file that could not be synced is not tried again. `synced`: false for one that nothing
  /// depends on.
  [[nodiscard]] CheckpointFile finish(bool synced = true);

 private:
  void hand_over(std::span<const std::byte> block);
  void flush();
  void write_at(std::span<const std::byte> data, std::uint64_t offset);
  void set_direct(bool direct) noexcept;

  std::string path_;
  std::uint64_t expected_;
  std::uint64_t handed_over_ = 0;
  int fd_ = -1;
  bool direct_ = false;
  std::vector<std::uint64_t> digests_;
  AlignedBytes filling_;
  AlignedBytes writing_;
  std::size_t filled_ = 0;
  std::unique_ptr<BlockWriter> writer_;  ///< last: its thread uses the others
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
  /// Reads whole chunks and compares them with the manifest; of those that are wanted in part it keeps the last. Throws
  /// kIo, and kCheckpoint with the file and the chunk whose bytes are others. Ascending offsets read every chunk once.
  void read(std::uint64_t offset, std::span<std::byte> into);
  /// From now on what is read is compared with nothing: for naming what a damaged range may have held.
  void trust() { trusting_ = true; }

 private:
  [[nodiscard]] std::size_t bytes_of(std::size_t chunk) const;
  /// A whole chunk, compared.
  void load(std::size_t chunk, std::span<std::byte> into);

  std::string path_;
  CheckpointFile file_;
  int fd_ = -1;
  std::vector<std::byte> chunk_;
  std::size_t loaded_ = ~std::size_t{0};
  bool trusting_ = false;
};

/// The whole of a small file, at most `most` bytes. Throws kIo, and kCheckpoint for one that is larger.
[[nodiscard]] std::string read_small_file(const std::string& path, std::uint64_t most);

/// The last bytes of a file, at most `most`; "" for what cannot be read, and for what is no regular file.
[[nodiscard]] std::string read_tail(const std::string& path, std::size_t most) noexcept;

/// 16 hexadecimal digits for a save, or for a removal. Throws kResource.
[[nodiscard]] std::string random_run();

/// Syncs a folder, so that names in it last. Throws kIo.
void sync_folder(const std::string& path);

}  // namespace zeroth::detail
