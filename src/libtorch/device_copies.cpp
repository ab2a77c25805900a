#include "libtorch/device_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace zeroth::libtorch {
namespace {

/// Every unit has a place of its own, unless the plan gathers parameters into a ring.
SlotTable places(const ModelLayout& layout, const ShardingPlan& plan) {
  if (plan.gathers_parameters()) return gathered_slots(layout, plan);
  std::vector<std::size_t> bytes;
  for (const FlatLayout& flat : layout.flats) bytes.push_back(flat.bytes());
  return make_slot_table(layout, bytes, /*shared_ring=*/false, plan.ring_slots);
}

at::Tensor bytes_on(c10::Device device, std::int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

DeviceCopies::DeviceCopies(c10::Device device, const ModelLayout& layout, const ShardingPlan& plan)
    : device_(device),
      layout_(layout),
      table_(places(layout, plan)),
      slot_user_(table_.slot_bytes.size(), -1),
      bound_flats_(table_.slot_bytes.size(), 0),
      overflow_(layout.flats.size()) {
  std::int64_t offset = 0;
  for (const std::size_t bytes : table_.slot_bytes) {
    slot_offset_.push_back(offset);
    offset += static_cast<std::int64_t>(bytes);
  }
  arena_ = bytes_on(device, offset);
}

int DeviceCopies::slot_of(int flat) const {
  return table_.unit_slot[static_cast<std::size_t>(layout_.flat(flat).unit)];
}

at::Tensor DeviceCopies::place_of(int flat) const {
  const auto index = static_cast<std::size_t>(flat);
  if (overflow_[index].defined()) return overflow_[index];
  const std::int64_t begin =
      slot_offset_[static_cast<std::size_t>(slot_of(flat))] + static_cast<std::int64_t>(table_.flat_offset[index]);
  return arena_.narrow(0, begin, static_cast<std::int64_t>(layout_.flat(flat).bytes()));
}

at::DataPtr DeviceCopies::fetch(int flat, const std::byte* host) {
  const FlatLayout& layout = layout_.flat(flat);
  if (layout.bytes() == 0) return {nullptr, device_};
  const auto slot = static_cast<std::size_t>(slot_of(flat));
  if (slot_user_[slot] >= 0 && slot_user_[slot] != layout.unit) {
    overflow_[static_cast<std::size_t>(flat)] = bytes_on(device_, static_cast<std::int64_t>(layout.bytes()));
    overflow_bytes_ += layout.bytes();
    overflow_peak_ = std::max(overflow_peak_, overflow_bytes_);
  } else {
    slot_user_[slot] = layout.unit;
    ++bound_flats_[slot];
  }
  refresh(flat, host);
  const at::Tensor place = place_of(flat);
  void* const data = place.mutable_data_ptr();
  // The address keeps its memory: what a graph has saved may outlive this object.
  return {data, new at::Tensor(place), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device_};
}

void DeviceCopies::refresh(int flat, const std::byte* host) {
  const auto bytes = static_cast<std::int64_t>(layout_.flat(flat).bytes());
  if (bytes == 0) return;
  const at::Tensor place = place_of(flat);
  if (device_.is_cpu()) {
    std::memcpy(place.mutable_data_ptr(), host, static_cast<std::size_t>(bytes));
    return;
  }
  place.copy_(at::from_blob(const_cast<std::byte*>(host), {bytes}, at::TensorOptions().dtype(at::kByte)));
}

void DeviceCopies::release(int flat) noexcept {
  const auto index = static_cast<std::size_t>(flat);
  const FlatLayout& layout = layout_.flat(flat);
  if (layout.bytes() == 0) return;
  if (overflow_[index].defined()) {
    overflow_bytes_ -= layout.bytes();
    overflow_[index].reset();
    return;
  }
  const auto slot = static_cast<std::size_t>(slot_of(flat));
  if (slot_user_[slot] == layout.unit && --bound_flats_[slot] == 0) slot_user_[slot] = -1;
}

}  // namespace zeroth::libtorch
