// BlockedStates: the rows of a state table that rest in blocks of a StateStore, one set of them.
//
//   flat 0, elements [0, 262144)       block 0   | master | exp_avg | exp_avg_sq |       block 0   | parameter |
//   flat 0, elements [262144, 400000)  block 1   | master | exp_avg | exp_avg_sq |       block 1   | parameter |
//   flat 1, ...                        block 2                                           block 2
//
// What is used together lies together, and one transfer brings it: what an update needs of the same elements, and
// apart from it what a gather reads.
#pragma once

#include "zero/state_bytes.h"

#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>
#include <zeroth/io/io_queue.h>
#include <zeroth/offload/stores.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/state_table.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// Where files of states lie, and what moves their bytes.
struct StateFiles {
  std::vector<std::string> folders{};            ///< one a disk
  std::vector<std::string> parameter_folders{};  ///< likewise; empty: the same
  std::size_t stripe_bytes = std::size_t{1} << 20U;
  FileAccess access = FileAccess::kDirect;
  std::shared_ptr<IoQueue> queue{};
  std::shared_ptr<TransferClock> clock{};  ///< of transfers and waits; null: each store has its own
};

/// One block on a lease, and where its rows are.
class [[nodiscard]] BlockLease {
 public:
  BlockLease() = default;
  /// Address of the entry of `element`, which must be in the block, of row `row` of the flat's rows in blocks.
  [[nodiscard]] std::byte* at(int row, std::int64_t element) const;

 private:
  friend class BlockedStates;
  StateLease lease_;
  Range range_{};
  std::span<const StateRow> rows_{};  ///< of the flat, those in blocks
};

class BlockedStates {
 public:
  /// Takes the rows of the set that are in blocks. `rank`: of the job, for the order of folders. Borrows `model`
  /// and `kernels`. Throws kIo, kOutOfMemory, kUsage.
  BlockedStates(const ModelLayout& model, std::span<const StateRow> rows, BlockSet set, const ResidencyPlan& residency,
                const StateFiles& files, int rank, Device& device, Kernels& kernels);

  /// True if the flat has rows in blocks.
  [[nodiscard]] bool has(int flat) const { return !flats_[static_cast<std::size_t>(flat)].rows.empty(); }
  /// Which of the flat's rows in blocks is of this kind, and of number `which` among the optimizer's states; -1: none.
  [[nodiscard]] int row_of(int flat, StateKind kind, int which) const;
  /// The elements of the block that has `element`.
  [[nodiscard]] Range block_of(int flat, std::int64_t element) const;
  /// How many blocks the flat has, and how many rows are in each.
  [[nodiscard]] int num_blocks(int flat) const;
  [[nodiscard]] int num_rows(int flat) const {
    return static_cast<int>(flats_[static_cast<std::size_t>(flat)].rows.size());
  }
  [[nodiscard]] DType dtype_of(int flat, int row) const {
    return flats_[static_cast<std::size_t>(flat)].rows[static_cast<std::size_t>(row)].dtype;
  }
  /// Blocks in memory at once, of those in files.
  [[nodiscard]] int slots() const { return slots_; }
  /// Whether the block that has `element` is in files, and whether any is.
  [[nodiscard]] bool in_files(int flat, std::int64_t element) const;
  [[nodiscard]] bool has_files() const { return has_files_; }
  /// Starts to bring that block, if there is a slot. Never blocks. True: it is in memory or on its way.
  bool prefetch(int flat, std::int64_t element);
  [[nodiscard]] BlockLease lease(int flat, std::int64_t element, Access access);

  /// Every block gets its first value, whatever its file has now: before all of them are written anew. Throws kIo for
  /// files that cannot be written.
  void reset();

  [[nodiscard]] const StateStore& store() const { return *store_; }
  /// Of blocks in memory and of slots. Slow: reads smaps.
  [[nodiscard]] std::uint64_t resident_bytes() const { return memory_.resident_bytes(); }

 private:
  struct OfFlat {
    int first = 0;                 ///< number of its first block
    std::vector<StateRow> rows{};  ///< in blocks, all of one range of elements
  };
  [[nodiscard]] int number_of(int flat, std::int64_t element) const;
  [[nodiscard]] std::string name_of(const ModelLayout& model, BlockSet set, const StateBlock& block) const;
  void fill(const StateBlock& block, std::span<std::byte> bytes) const;

  Kernels& kernels_;
  std::int64_t block_elements_;
  int slots_;
  bool has_files_ = false;
  std::vector<OfFlat> flats_;
  std::vector<StateBlock> blocks_;
  Arena memory_;
  std::vector<MemoryHold> holds_;
  std::unique_ptr<StateStore> store_;
};

}  // namespace zeroth
