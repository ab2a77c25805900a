// LandingSums: sums of gradients on their way from a device to the host memory where they rest.
//
//   reduction of unit i     bucket -> slot             the next units go on
//   one of unit i - 2                         slot     + what rests in host memory, and its norm
//
// Copies have a stream of their own, and the host adds up what has come while the device computes. Of the device's
// memory only buckets are needed.
// Ref: Ren et al., "ZeRO-Offload", ATC 2021, section 4.
#pragma once

#include "zero/model_memory.h"
#include "zero/reduced_shards.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace zeroth {

class LandingSums {
 public:
  /// Borrows all. `stream`: of reductions.
  LandingSums(const ModelLayout& model, ModelMemory& memory, ReducedShards& shards, Stream stream);

  /// One reduction event of the flat: the new sum of ModelMemory::micro_step_part() is at `from`, on the device, when
  /// the stream of reductions has come to this call. It is quiet until await_copies(). Blocks only while all slots are
  /// on their way.
  void start(int flat, const std::byte* from, DType dtype);
  /// What the stream of reductions is given from now on comes after all copies.
  void await_copies();
  /// Adds up what has come. Never blocks.
  void progress();
  /// Blocks until all sums rest in host memory.
  void finish();
  /// Whether no sum of the flat is on its way.
  [[nodiscard]] bool has_landed(int flat) const { return under_way_[static_cast<std::size_t>(flat)] == 0; }
  /// The next event of each flat stores. Sums that are on their way are gone.
  void begin_step();

 private:
  struct Crossing {
    BusSlot slot;
    int flat = 0;
    ReducedShards::Landed part{};
  };
  void land_first();

  const ModelLayout& model_;
  ModelMemory& memory_;
  ReducedShards& shards_;
  Stream stream_;
  std::size_t most_;  ///< crossings at once: a slot is left for parameters
  std::deque<Crossing> crossings_;
  std::vector<int> under_way_;  ///< crossings, one a flat
};

}  // namespace zeroth
