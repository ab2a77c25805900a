// How long blocks take to and from files, measured.
#pragma once

#include <zeroth/io/io_queue.h>
#include <zeroth/io/scratch_file.h>

#include <cstddef>
#include <string>
#include <vector>

namespace zeroth {

struct BlockTimesOptions {
  std::vector<std::string> folders{};  ///< one a disk; at least one
  std::size_t stripe_bytes = std::size_t{1} << 20U;
  std::size_t first_folder = 0;  ///< see StripeOptions
  FileAccess access = FileAccess::kDirect;
  std::size_t block_bytes = 0;
  int slots = 4;         ///< transfers of whole blocks at once
  double seconds = 0.1;  ///< of each of three measurements; beyond that only a round that has begun
};

/// Of one block, in seconds, while reads and writes go on at once.
struct BlockTimes {
  double read_s = 0.0;
  double write_s = 0.0;
};

/// Writes and reads a few blocks in files of its own, of at most 4 MiB each: of larger ones the time in proportion.
/// Blocks for about 3 * options.seconds and the first write of the files, each transfer within the timeout of the
/// queue. Throws kIo and kTimeout as the queue and ScratchFile::create() do, kUsage for a block without bytes.
[[nodiscard]] BlockTimes measure_block_times(const BlockTimesOptions& options, IoQueue& queue);

}  // namespace zeroth
