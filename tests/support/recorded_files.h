// The calls by which a program changes files, as this process makes them: an executable that links recorded_files.cpp
// has these system calls pass through a log. Nothing in the program knows of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroth::test {

struct FileOp {
  enum class Kind {
    kMakeFile,
    kMakeFolder,
    kWrite,        ///< `data` at `offset`
    kResize,       ///< to `offset` bytes: ftruncate; or at least so many: fallocate
    kSync,         ///< of a file or folder
    kRename,       ///< to `to`
    kExchange,     ///< of the names `path` and `to`
    kRemove,       ///< of a file or an empty folder
    kAcknowledge,  ///< no call: the program was told that step `offset` is saved
  };
  Kind kind{};
  std::string path{};
  std::string to{};
  std::uint64_t offset = 0;
  std::string data{};
};

/// While it lives, the calls of all threads that concern paths in `root` are logged, in the order in which they are
/// made. One at a time.
class FileRecording {
 public:
  explicit FileRecording(std::string root);
  FileRecording(const FileRecording&) = delete;
  FileRecording& operator=(const FileRecording&) = delete;
  ~FileRecording();

  void acknowledge(std::int64_t step);
  [[nodiscard]] std::vector<FileOp> take();

  /// For the calls.
  [[nodiscard]] bool concerns(const std::string& path) const;
  void add(FileOp op) { ops_.push_back(std::move(op)); }

 private:
  std::string root_;
  std::vector<FileOp> ops_;
};

}  // namespace zeroth::test
