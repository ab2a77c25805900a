// BlockWriter: hands blocks to a thread that writes them, so that the next one is made meanwhile.
#pragma once

#include <zeroth/base/error.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

namespace zeroth::detail {

class BlockWriter {
 public:
  using WriteAt = std::function<void(std::span<const std::byte> block, std::uint64_t offset)>;
  /// `write_at` is called on the thread; what it throws is thrown by the next call here.
  explicit BlockWriter(WriteAt write_at);
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;
  /// Waits for the block that is being written.
  ~BlockWriter();

  /// Waits until the block before is written, and begins with this one, which must live until then.
  void write(std::span<const std::byte> block, std::uint64_t offset);
  /// Waits until the last block is written.
  void finish();

 private:
  void run();

  WriteAt write_at_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::span<const std::byte> block_{};  ///< empty: there is none
  std::uint64_t offset_ = 0;
  bool ends_ = false;
  std::optional<Error> error_;
  std::thread thread_;
};

}  // namespace zeroth::detail
