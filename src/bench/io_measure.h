// Sequential transfers between memory and scratch files, as the engines of this machine make them.
#pragma once

#include "bench/io_choice.h"

#include <zeroth/device/memory.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/io/scratch_file.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth::bench {

struct IoMeasureOptions {
  std::vector<std::string> folders{};
  FileAccess access = FileAccess::kDirect;
  std::uint64_t file_bytes = std::uint64_t{256} << 20U;  ///< over all folders
  double seconds = 0.5;    ///< of reads, and of writes, a row; at least one pass over the files
  bool one_thread = true;  ///< IoQueueOptions::one_thread
};

/// Files that are written once, so that no row pays for the first write to reserved space, and memory for them.
class IoMeasure {
 public:
  explicit IoMeasure(IoMeasureOptions options);

  /// One row. Whole passes over the files in turn: the block at a time, always `depth` in flight; the median pass
  /// counts. Throws kIo where this machine does not have the engine.
  [[nodiscard]] IoTiming row(IoEngineKind engine, std::uint64_t block_bytes, int depth) const;

  /// Why the files are not as `access` says; "" if they are.
  [[nodiscard]] std::string reason() const;
  [[nodiscard]] FileAccess access() const;

 private:
  [[nodiscard]] std::vector<IoRequest> requests(IoOp op, std::uint64_t block_bytes, std::size_t batch) const;
  [[nodiscard]] std::size_t batch_of(std::uint64_t block_bytes, int depth) const;
  static void pass(IoQueue& queue, std::span<const IoRequest> requests, std::size_t batch);
  [[nodiscard]] double speed(IoQueue& queue, IoOp op, std::uint64_t block_bytes, int depth) const;

  IoMeasureOptions options_;
  std::vector<std::shared_ptr<const ScratchFile>> files_;
  Arena memory_;
};

}  // namespace zeroth::bench
