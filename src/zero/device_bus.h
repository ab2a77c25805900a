// DeviceBus: pieces of states on their way between a device and its host, through a few slots of pinned memory.
//
//   fetch(): device -> slot    in the stream "down"; wait() is the host's only wait, for this piece
//   send():  slot -> device    in a stream of the caller; the slot is free again when the device has come to the copy
//
// A caller takes as many slots as it works ahead, so copies go on while the host computes on another slot.
// On ranks of a CPU there is nothing to cross, and no bus.
// Ref: Ren et al., "ZeRO-Offload", ATC 2021, section 4.
#pragma once

#include <zeroth/compute/kernels.h>
#include <zeroth/device/device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace zeroth {

class DeviceBus;

/// A lease on a slot. Move-only. Its end never blocks: the slot is free when its copies have ended.
class [[nodiscard]] BusSlot {
 public:
  BusSlot(BusSlot&& other) noexcept : bus_(std::exchange(other.bus_, nullptr)), number_(other.number_) {}
  BusSlot& operator=(BusSlot&& other) noexcept {
    if (this != &other) {
      give_back();
      bus_ = std::exchange(other.bus_, nullptr);
      number_ = other.number_;
    }
    return *this;
  }
  BusSlot(const BusSlot&) = delete;
  BusSlot& operator=(const BusSlot&) = delete;
  ~BusSlot() { give_back(); }

  /// At a multiple of 64 bytes. The host may touch what fetch() fills after wait(), and nothing after send().
  [[nodiscard]] std::span<std::byte> bytes() const;
  /// Memory of the device that belongs to the slot, for what the device makes before it crosses, or of what has
  /// crossed.
  [[nodiscard]] std::span<std::byte> on_device() const;
  /// Starts to copy from the device to the slot's bytes from `at` on. Never blocks.
  void fetch(std::size_t at, const std::byte* from, std::size_t bytes);
  /// Whether everything that was fetched is there. Never blocks.
  [[nodiscard]] bool ready() const;
  /// Blocks until everything that was fetched is there. Throws the errors of the device.
  void wait();
  /// Starts to copy the slot's bytes from `at` on to the device, in `stream`. Never blocks.
  void send(std::size_t at, std::byte* to, std::size_t bytes, const Stream& stream);

 private:
  friend class DeviceBus;
  BusSlot(DeviceBus& bus, std::size_t number) : bus_(&bus), number_(number) {}
  void give_back() noexcept;
  DeviceBus* bus_;
  std::size_t number_;
};

class DeviceBus {
 public:
  /// Bytes that have crossed the bus so far, each way.
  struct Counters {
    std::uint64_t down = 0;
    std::uint64_t up = 0;
  };

  /// Borrows both. `kernels` are the device's. `device_bytes`: of BusSlot::on_device(). Throws kOutOfMemory.
  DeviceBus(Device& device, Kernels& kernels, std::size_t slot_bytes, std::size_t device_bytes, int slots);
  DeviceBus(const DeviceBus&) = delete;
  DeviceBus& operator=(const DeviceBus&) = delete;
  ~DeviceBus();

  /// A slot whose copies have ended; nothing if there is none now. Never blocks.
  [[nodiscard]] std::optional<BusSlot> try_take();
  /// Blocks for the copies of the slot that was given back first. Throws kInternal if all slots are on leases.
  [[nodiscard]] BusSlot take();

  /// Copies from the device: what they read must be ordered before it.
  [[nodiscard]] const Stream& down() const { return down_; }
  /// For copies to the device whose order nobody else says.
  [[nodiscard]] const Stream& up() const { return up_; }
  [[nodiscard]] const Counters& counters() const { return counters_; }
  /// Why copies wait, see CopyMemory; empty: they do not.
  [[nodiscard]] const std::string& refusal() const { return refusal_; }

 private:
  friend class BusSlot;
  struct Slot {
    std::span<std::byte> bytes{};
    std::span<std::byte> on_device{};
    Event last{};  ///< of its copies
    std::uint64_t given_back = 0;
    bool leased = false;
  };

  Kernels& kernels_;
  Arena memory_;
  Arena on_device_;
  std::string refusal_;
  MemoryHold hold_;
  Stream down_;
  Stream up_;
  std::vector<Slot> slots_;
  std::uint64_t returns_ = 0;
  Counters counters_;
};

}  // namespace zeroth
