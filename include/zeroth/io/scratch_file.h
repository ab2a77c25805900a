// Files for what memory has no room for: without a name, of a fixed size, gone with the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// How the bytes of a file pass the page cache.
enum class FileAccess {
  kDirect,    ///< past it (O_DIRECT): from the disk to the caller's memory, without a copy
  kBuffered,  ///< through it
};
[[nodiscard]] std::string_view name_of(FileAccess access) noexcept;

struct ScratchOptions {
  /// kDirect is a wish: where the file system refuses it, or a written block does not read back, the file is buffered
  /// and says why (ScratchFile::reason()). kBuffered never asks for direct.
  FileAccess access = FileAccess::kDirect;
};

/// A file without a name in a folder of the user's choice. Its space is reserved when it is made and given back when
/// the last owner goes, also after kill -9. Shared, so that requests keep it open until they are done. Thread safe.
/// Reads of bytes that were never written give zeros.
class ScratchFile {
 public:
  /// Makes a file of `bytes`, rounded up to a multiple of the alignment. Blocks for a few small transfers.
  /// Throws kUsage for a size of 0 or above 2^62; kIo if the folder takes no file, or has no room for it: with wanted
  /// and free bytes.
  [[nodiscard]] static std::shared_ptr<const ScratchFile> create(const std::string& folder, std::uint64_t bytes,
                                                                 const ScratchOptions& options = {});
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile();

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  /// Offset, length and memory address of every transfer are multiples of it: a power of two, at least 4096. Buffered
  /// files have it too, so that a caller that works with one works with the other.
  [[nodiscard]] std::size_t alignment() const { return alignment_; }
  [[nodiscard]] FileAccess access() const { return access_; }
  /// Why the file is not direct; "" if it is, or if nobody asked for it.
  [[nodiscard]] const std::string& reason() const { return reason_; }
  /// False where the file system cannot reserve: a write may then fail with ENOSPC.
  [[nodiscard]] bool reserved() const { return reserved_; }
  [[nodiscard]] const std::string& folder() const { return folder_; }
  /// The descriptor, for an engine. It stays the file's.
  [[nodiscard]] int descriptor() const { return descriptor_; }

 private:
  ScratchFile(std::string folder, int descriptor);
  void reserve(std::uint64_t bytes);
  void choose_access(FileAccess wanted);

  std::string folder_;
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;
  std::size_t alignment_ = 0;
  FileAccess access_ = FileAccess::kBuffered;
  std::string reason_;
  bool reserved_ = false;
};

}  // namespace zeroth
