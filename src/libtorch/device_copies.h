// DeviceCopies: the parameters that units compute with, where these are not the engine's own memory.
//
//   engine: parameters, gradients, optimizer (host memory)  --values-->  copies on the GPU  --forward, backward-->
//   gradients --> host
//
// The engine keeps everything in host memory and computes its sums and updates there. On an accelerator a flat that is
// bound gets its values by a copy to a place on that device; the places are those of the plan: one a unit, or the ring
// where parameters are sharded. One arena, allocated once by torch's allocator of the device. A unit that finds its
// place taken gets memory of its own for a while.
#pragma once

#include <zeroth/zero/memory_plan.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zeroth::libtorch {

/// One thread at a time. Copies are ordered on the current stream of the device, and have been read from the host when
/// a call returns.
class DeviceCopies {
 public:
  DeviceCopies(c10::Device device, const ModelLayout& layout, const ShardingPlan& plan);

  /// Copies `host`, the values of the whole flat, to the flat's place, and keeps the place for it until release().
  /// Returns its address.
  [[nodiscard]] at::DataPtr fetch(int flat, const std::byte* host);
  /// The flat has a place, and there are new values for it.
  void refresh(int flat, const std::byte* host);
  /// Notes whether the copy has been written to, see take_lost().
  void release(int flat) noexcept;

  /// [Note: Writes to copies] Whoever writes to a parameter by its `.data` leaves no trace in autograd. So a copy has a
  /// digest of 64 bits, computed where it lies: one pass over its memory when it is made, and one when it is looked at.
  /// Of `flats`, which have places: those that were written to since fetch() or refresh(). Waits for the device once.
  [[nodiscard]] std::vector<int> written(const std::vector<int>& flats) const;
  /// The copy goes to `host`, of which it is a copy again.
  void take(int flat, std::byte* host);
  /// Flats whose copies had been written to when they were released, since the last call. Waits for the device where
  /// copies were released.
  [[nodiscard]] std::vector<int> take_lost();

  [[nodiscard]] c10::Device device() const { return device_; }
  /// Bytes of the arena, and of what was needed beyond it at one time.
  [[nodiscard]] std::uint64_t bytes() const { return arena_.nbytes() + overflow_peak_; }

 private:
  [[nodiscard]] at::Tensor place_of(int flat) const;
  [[nodiscard]] int slot_of(int flat) const;

  c10::Device device_;
  const ModelLayout& layout_;
  SlotTable table_;
  std::vector<std::int64_t> slot_offset_;
  at::Tensor arena_;                  // [bytes] uint8
  std::vector<int> slot_user_;        // unit, -1
  std::vector<int> bound_flats_;      // one a slot: of its user
  std::vector<at::Tensor> overflow_;  // one a flat, undefined as a rule
  std::vector<at::Tensor> digests_;   // one a flat, int64 on the device: of the copy as the engine made it
  std::vector<at::Tensor> differs_;   // one a flat, bool on the device, undefined if nothing was released
  std::uint64_t overflow_bytes_ = 0;
  std::uint64_t overflow_peak_ = 0;
};

}  // namespace zeroth::libtorch
