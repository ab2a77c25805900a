// Bytes that a step moves between a device and its host. A pure function of the layout, as plan_memory().
#pragma once

#include <zeroth/zero/model_layout.h>
#include <zeroth/zero/plan.h>

#include <cstdint>
#include <span>

namespace zeroth {

/// Of one rank; nothing on ranks of a CPU.
struct BusTraffic {
  std::uint64_t down = 0;  ///< to the host
  std::uint64_t up = 0;    ///< to the device

  BusTraffic& operator+=(const BusTraffic& other) {
    down += other.down;
    up += other.up;
    return *this;
  }
  bool operator==(const BusTraffic&) const = default;
};

/// A step in which every unit runs once forward and once backward in each of `micro_steps`, and every parameter has a
/// gradient. Sum over the flats, in elements times bytes per element (p, or a of the accumulation dtype):
///   sums that leave the device  a x (piece), down for each reduction; up for the update of a device
///   the host updates            other sums a, or 2 if they are rounded, x (part of the update), down; parameters of
///                               the device p x (part of the update), up, and down unless a whole master has their
///                               value
///   the device updates          parameters that rest beside it p x (part of the update), up and down
///   parameters beside it        p x (part at rest), up for each gather; where the updates of other ranks come here
///                               (plan_wire(): publish_parameters), the own part up and all of it down
/// `gathers`: as plan_wire(). An update that is delayed moves as many bytes, one step late; sums that other ranks take
/// then cross on their way to where they wait, and are not in these bytes.
[[nodiscard]] BusTraffic plan_bus_traffic(const ModelLayout& model, const ShardingPlan& plan, int rank, int micro_steps,
                                          std::span<const int> gathers = {});

}  // namespace zeroth
