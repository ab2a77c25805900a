// Bytes that a step moves between memory and the files of a plan. A pure function of the layout, as plan_memory().
#pragma once

#include <zeroth/optim/optimizer.h>
#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>
#include <zeroth/zero/state_table.h>

#include <cstdint>
#include <span>

namespace zeroth {

/// Of one set of states, on one rank: blocks in files, each rounded up to the alignment of files.
struct FileTraffic {
  std::uint64_t read_bytes = 0;
  std::uint64_t write_bytes = 0;

  FileTraffic& operator+=(const FileTraffic& other) {
    read_bytes += other.read_bytes;
    write_bytes += other.write_bytes;
    return *this;
  }
  bool operator==(const FileTraffic&) const = default;
};

/// A step in which every unit runs once forward and once backward in each of `micro_steps`, and every parameter has a
/// gradient. Sum over blocks in files:
///   updates     read once and written once in each pass of the update
///   parameters  read for each gather of their unit, and for each part that is updated apart and each pass,
///               written behind that part; where the updates of other ranks come here (plan_wire():
///               publish_parameters), the own part is read and all is written once more
/// What is still in memory is in these bytes too: StoreCounters::spared_read_bytes and spared_write_bytes say how much
/// of them it was. `gathers`: as plan_wire(). `passes`: 2 for an optimizer with facts.
[[nodiscard]] FileTraffic plan_file_traffic(const ModelLayout& model, const ShardingPlan& plan, int rank,
                                            std::span<const StateDeclaration> states, int micro_steps, BlockSet set,
                                            std::span<const int> gathers = {}, int passes = 1);

}  // namespace zeroth
