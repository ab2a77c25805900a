// Room in files for blocks that come and go.
#pragma once

#include <zeroth/io/scratch_file.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace zeroth::offload {

/// A range of one of the files.
struct Extent {
  std::size_t file = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// First fit over a list of files, which grows. Neighbouring free ranges become one. One thread at a time.
class FileSpace {
 public:
  FileSpace(std::vector<std::string> folders, ScratchOptions options, std::uint64_t file_bytes)
      : folders_(std::move(folders)), options_(options), file_bytes_(file_bytes) {}

  /// `bytes`: a multiple of the files' alignment. Throws as ScratchFile::create().
  [[nodiscard]] Extent take(std::uint64_t bytes);
  void give_back(const Extent& extent);

  [[nodiscard]] const std::shared_ptr<const ScratchFile>& file(std::size_t number) const { return files_[number].file; }
  [[nodiscard]] std::size_t num_files() const { return files_.size(); }
  [[nodiscard]] std::uint64_t bytes() const;
  [[nodiscard]] std::uint64_t free_bytes() const;

 private:
  struct File {
    std::shared_ptr<const ScratchFile> file;
    std::map<std::uint64_t, std::uint64_t> free;  // offset -> bytes
  };

  std::vector<std::string> folders_;
  ScratchOptions options_;
  std::uint64_t file_bytes_;
  std::vector<File> files_;
};

}  // namespace zeroth::offload
