// Writes safetensors files, one tensor after the other. A reader never sees a partial file.
// Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data).
#pragma once

#include <zeroth/base/dtype.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

struct SafetensorsEntry {
  std::string name{};
  /// C64 F64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 I64 I32 I16 I8 U64 U32 U16 U8 BOOL
  std::string dtype{};
  std::vector<std::int64_t> shape{};
  std::uint64_t bytes = 0;
};

[[nodiscard]] std::string safetensors_dtype(DType dtype);

/// Writes to "<path>.tmp-<pid>-<random>" in the same folder. commit() syncs that file, renames it to `path` and syncs
/// the folder. If destroyed before commit(), it removes the temporary file and leaves `path` unchanged. All calls
/// block.
class SafetensorsWriter {
 public:
  /// Throws kIo if the file cannot be created. Throws kUsage for two entries with one name, a name that is
  /// "__metadata__" or not UTF-8, and an entry whose bytes do not fit its shape and dtype.
  SafetensorsWriter(std::string path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();

  /// Appends data in the order of the entries, in pieces of any size. Throws kIo (disk full, for example).
  void write(std::span<const std::byte> data);
  /// Syncs the data written so far to the disk, so that commit() is short. Throws kIo.
  void flush();
  /// Makes the file visible under its name. Throws kIo, or kUsage if data is missing or it was called before.
  void commit();

 private:
  void write_all(const void* data, std::size_t bytes);
  std::string path_;
  std::string temporary_;  ///< "" once it has its final name
  int fd_ = -1;
  std::uint64_t expected_ = 0;
  std::uint64_t written_ = 0;
  std::uint64_t flushed_ = 0;
};

}  // namespace zeroth
