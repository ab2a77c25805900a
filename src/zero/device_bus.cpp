#include "zero/device_bus.h"

#include <zeroth/base/error.h>

#include <algorithm>

namespace zeroth {

DeviceBus::DeviceBus(Device& device, Kernels& kernels, std::size_t slot_bytes, std::size_t device_bytes, int slots)
    : kernels_(kernels),
      on_device_(kernels.make_arena(device_bytes * static_cast<std::size_t>(slots), "bus")),
      down_(device.make_stream("down")),
      up_(device.make_stream("up")) {
  CopyMemory memory = device.make_copy_memory(slot_bytes * static_cast<std::size_t>(slots), "bus");
  memory_ = std::move(memory.arena);
  refusal_ = std::move(memory.refusal);
  hold_ =
      device.ledger().hold({-1, MemoryState::kStaging}, (slot_bytes + device_bytes) * static_cast<std::size_t>(slots));
  for (int slot = 0; slot < slots; ++slot) {
    slots_.push_back({.bytes = memory_.reserve(slot_bytes, kSegmentAlignBytes),
                      .on_device = on_device_.reserve(device_bytes, kSegmentAlignBytes)});
  }
}

DeviceBus::~DeviceBus() {
  for (const Slot& slot : slots_) {
    try {
      slot.last.wait();  // the memory goes
    } catch (...) {      // NOLINT(bugprone-empty-catch): a device that has failed copies nothing any more
    }
  }
}

std::optional<BusSlot> DeviceBus::try_take() {
  for (std::size_t number = 0; number < slots_.size(); ++number) {
    Slot& slot = slots_[number];
    if (slot.leased || !slot.last.ready()) continue;
    slot.leased = true;
    return BusSlot(*this, number);
  }
  return std::nullopt;
}

BusSlot DeviceBus::take() {
  if (std::optional<BusSlot> slot = try_take()) return std::move(*slot);
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (!slot.leased && (oldest == nullptr || slot.given_back < oldest->given_back)) oldest = &slot;
  }
  ZR_CHECK(oldest != nullptr, ErrorCode::kInternal, "all slots of the bus are in use", {.where = "zero.bus"});
  oldest->last.wait();
  oldest->leased = true;
  return {*this, static_cast<std::size_t>(oldest - slots_.data())};
}

std::span<std::byte> BusSlot::bytes() const {
  return bus_->slots_[number_].bytes;
}

std::span<std::byte> BusSlot::on_device() const {
  return bus_->slots_[number_].on_device;
}

void BusSlot::fetch(std::size_t at, const std::byte* from, std::size_t bytes) {
  DeviceBus::Slot& slot = bus_->slots_[number_];
  ZR_ASSERT(at + bytes <= slot.bytes.size(), "more than a slot of the bus has");
  bus_->down_.enqueue([&bus = *bus_, to = slot.bytes.data() + at, from, bytes] {
    bus.kernels_.copy_over_bus(to, from, bytes, bus.down_);
  });
  slot.last = bus_->down_.record();
  bus_->counters_.down += bytes;
}

bool BusSlot::ready() const {
  return bus_->slots_[number_].last.ready();
}

void BusSlot::wait() {
  bus_->slots_[number_].last.wait();
}

void BusSlot::send(std::size_t at, std::byte* to, std::size_t bytes, const Stream& stream) {
  DeviceBus::Slot& slot = bus_->slots_[number_];
  ZR_ASSERT(at + bytes <= slot.bytes.size(), "more than a slot of the bus has");
  stream.enqueue([&bus = *bus_, to, from = slot.bytes.data() + at, bytes, stream] {
    bus.kernels_.copy_over_bus(to, from, bytes, stream);
  });
  slot.last = stream.record();
  bus_->counters_.up += bytes;
}

void BusSlot::give_back() noexcept {
  if (bus_ == nullptr) return;
  DeviceBus::Slot& slot = bus_->slots_[number_];
  slot.leased = false;
  slot.given_back = ++bus_->returns_;
  bus_ = nullptr;
}

}  // namespace zeroth
