// One range of bytes over files in several folders, so that all disks work at once.
#pragma once

#include <zeroth/io/io_queue.h>
#include <zeroth/io/scratch_file.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct StripeOptions {
  std::size_t stripe_bytes = std::size_t{1} << 20U;  ///< multiple of the alignment of every file
  /// Index of the folder of the first stripe, modulo their number. Ranks that share folders give their rank, so that
  /// they do not all begin with the same disk.
  std::size_t first_folder = 0;
  ScratchOptions file{};
};

/// Stripe i of the range, bytes [i * stripe_bytes, (i + 1) * stripe_bytes), is stripe i / N of file
/// (first_folder + i) % N, for N folders. A value; copies share the files.
class StripedFile {
 public:
  /// Makes one file a folder. `bytes` is rounded up to whole stripes. Throws kUsage for no folder, or a stripe that
  /// does not fit the alignment; else as ScratchFile::create().
  [[nodiscard]] static StripedFile create(std::span<const std::string> folders, std::uint64_t bytes,
                                          const StripeOptions& options = {});

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] std::size_t stripe_bytes() const { return stripe_bytes_; }
  /// The largest of the files'.
  [[nodiscard]] std::size_t alignment() const { return alignment_; }
  /// In the order of the folders.
  [[nodiscard]] std::span<const std::shared_ptr<const ScratchFile>> files() const { return files_; }

  /// Requests that move [offset, offset + memory.size()), in its order, none across a stripe's end: all disks get work
  /// from a range of N stripes. Throws kUsage for a range that is not aligned or leaves the file.
  [[nodiscard]] std::vector<IoRequest> requests(IoOp op, std::uint64_t offset, std::span<std::byte> memory,
                                                std::string_view name) const;

 private:
  std::vector<std::shared_ptr<const ScratchFile>> files_;
  std::uint64_t bytes_ = 0;
  std::size_t stripe_bytes_ = 0;
  std::size_t alignment_ = 0;
  std::size_t first_folder_ = 0;
};

}  // namespace zeroth
