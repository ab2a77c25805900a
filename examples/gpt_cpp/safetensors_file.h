// Reading safetensors files. Knows no torch.
// Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace gpt {

using Shape = std::vector<std::int64_t>;

struct StoredTensor {
  std::string dtype{};  ///< "F64", "F32", "BF16", "F16", "I64", ...
  Shape shape{};
  std::span<const std::byte> data{};  ///< row-major; exactly as many bytes as dtype and shape say; of any alignment
};

/// The tensors of a file's bytes, by name; their data lies in these bytes. `path` is for the error.
/// @throws zeroth::Error kIo: which rule of the format is broken, and of which tensor.
[[nodiscard]] std::map<std::string, StoredTensor> parse_safetensors(std::span<const std::byte> file,
                                                                    const std::filesystem::path& path);

/// A file in memory.
class SafetensorsFile {
 public:
  /// @throws zeroth::Error kIo: the file cannot be read, or is none of this format (which rule it breaks).
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  /// By name; their data lives as long as this.
  [[nodiscard]] const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  /// Its tensors have these names and shapes, no more and no fewer, and hold floating-point numbers.
  /// @throws zeroth::Error kUsage with the names that differ.
  void require_weights(const std::map<std::string, Shape>& shapes) const;

 private:
  std::filesystem::path path_;
  std::vector<std::byte> bytes_{};
  std::map<std::string, StoredTensor> tensors_{};
};

}  // namespace gpt
