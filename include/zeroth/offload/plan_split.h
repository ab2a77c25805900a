// Which blocks of states rest where, planned from measured times. Pure functions: no files, no ranks.
//
//   over two tiers        M F M M F M ...   F rests in files: read, updated, written; M rests in memory: updated
//   over two processors   H D H H D H ...   D is fetched to the device, updated there, returned; H is updated by the
//   host
//
// Both are pipelines of a few resources in which blocks keep their order. Blocks are taken as equally large.
// Ref: Twin-Flow (ZeRO-Offload++), 2023; Maurya et al., "Deep Optimizer States", Middleware 2024.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {

/// An update of blocks in order, some of which rest in files. Reads go one after the other, and writes too; a read
/// beside a write, each at the speed it has beside the other. A read needs a slot: that of the block in files `slots`
/// before it, once that is written.
struct TierSplitProblem {
  int blocks = 0;
  int slots = 2;          ///< blocks of files in memory at once
  double update_s = 0.0;  ///< of a block in memory
  double read_s = 0.0;    ///< of a block
  double write_s = 0.0;   ///< of a block
  double ahead_s = 0.0;   ///< before the first update, in which reads go on unseen
  double behind_s = 0.0;  ///< after the last update, in which writes go on unseen
  /// Bytes of memory with k blocks in files, k from 0 to `blocks`.
  std::vector<std::uint64_t> memory_of{};
  std::uint64_t memory_bytes = 0;  ///< that there are
  int least_files = 0;             ///< blocks that must be in files for another reason
  std::string limit{};             ///< which limit that is, for `why`; "": memory_bytes
};

/// One choice and what it costs.
struct TierSplit {
  std::vector<bool> in_files{};  ///< one a block
  int files = 0;                 ///< how many of them
  double step_s = 0.0;           ///< from the first update to the end of the last, with writes beyond behind_s
  std::uint64_t memory_bytes = 0;
  bool fits = false;
};

struct TierSplitPlan {
  TierSplit chosen{};
  std::vector<TierSplit> choices{};  ///< by number of blocks in files: all of them, or some 64 where blocks are many
  std::string why{};                 ///< one line
};

/// The fastest choice that fits; among equally fast ones the one with the fewest blocks in files. Where none fits: all
/// blocks in files, with fits == false. Exact for up to kExactBlocks blocks; for more, the best of some steady
/// interleavings for each number of blocks. Throws kUsage for a problem without a meaning.
[[nodiscard]] TierSplitPlan plan_tier_split(const TierSplitProblem& problem);
/// What a given choice costs.
[[nodiscard]] double update_time(const TierSplitProblem& problem, const std::vector<bool>& in_files);

/// An update of blocks whose states are in host memory, by the host and a device at once. Fetches and uploads share the
/// link to the device, in the order of the blocks; results return on the other link.
struct ProcessorSplitProblem {
  int blocks = 0;
  int slots = 2;                 ///< blocks on the device at once
  double host_update_s = 0.0;    ///< of a block
  double device_update_s = 0.0;  ///< of a block
  double fetch_s = 0.0;          ///< states of a block to the device
  double return_s = 0.0;         ///< and back
  double upload_s = 0.0;         ///< parameters that the host has updated, to the device
};

struct ProcessorSplitPlan {
  std::vector<bool> on_device{};  ///< one a block
  double step_s = 0.0;            ///< until all is where it belongs
  double host_only_s = 0.0;
  double device_only_s = 0.0;
  std::string why{};  ///< one line
};

/// The fastest choice; exact for up to kExactBlocks blocks, as plan_tier_split(). Throws kUsage.
[[nodiscard]] ProcessorSplitPlan plan_processor_split(const ProcessorSplitProblem& problem);
[[nodiscard]] double update_time(const ProcessorSplitProblem& problem, const std::vector<bool>& on_device);

inline constexpr int kExactBlocks = 14;

}  // namespace zeroth
