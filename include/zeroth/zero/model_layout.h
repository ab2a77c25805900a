// ModelLayout: parameters, units, flat buffers and slots of one model on one group of ranks. A pure value, equal on all
// ranks.
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/shard/flat_layout.h>
#include <zeroth/shard/param_spec.h>
#include <zeroth/zero/plan.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zeroth {

/// Where one parameter lies.
struct ParamPlace {
  int unit = -1;
  int flat = -1;     ///< index into ModelLayout::flats
  int segment = -1;  ///< index into that flat's segments
  bool operator==(const ParamPlace&) const = default;
};

struct ModelLayout {
  std::vector<ParamSpec> params{};
  std::vector<UnitSpec> units{};
  std::vector<FlatLayout> flats{};
  std::vector<std::vector<int>> unit_flats{};  ///< flats of each unit
  std::vector<ParamPlace> places{};            ///< one a parameter
  int world = 1;

  [[nodiscard]] const Segment& segment(int param) const {
    const ParamPlace& place = places[static_cast<std::size_t>(param)];
    return flats[static_cast<std::size_t>(place.flat)].segments[static_cast<std::size_t>(place.segment)];
  }
  [[nodiscard]] const FlatLayout& flat(int index) const { return flats[static_cast<std::size_t>(index)]; }
  /// One line a parameter: what must agree between ranks, comparable by people.
  [[nodiscard]] std::string describe_param(int param) const;
  bool operator==(const ModelLayout&) const = default;
};

/// Checks that every parameter is in exactly one unit and that names are unique; throws kModel with the name. The
/// layout is for plans with these degrees, those of a plan without any for all such plans.
[[nodiscard]] ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units,
                                            const Degrees& degrees);
/// For plans that split states over all ranks, or not at all.
[[nodiscard]] ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, int world);

/// A place in memory that units use in turn. Addresses are static: unit -> slot never changes.
struct SlotTable {
  std::vector<std::size_t> slot_bytes{};   ///< one a slot, multiple of kSegmentAlignBytes
  std::vector<int> unit_slot{};            ///< one a unit, -1 if the unit needs none
  std::vector<std::size_t> flat_offset{};  ///< one a flat, inside its unit's slot

  [[nodiscard]] std::size_t total_bytes() const;
  /// Where the slot of `unit` begins, if slots lie one after the other.
  [[nodiscard]] std::size_t slot_offset(int unit) const;
  bool operator==(const SlotTable&) const = default;
};

/// Slots for `flat_bytes` (0: the flat does not take part). With `shared_ring`, repeated units share min(ring_slots,
/// number of repeated units) slots, ring index modulo; every other unit has its own.
[[nodiscard]] SlotTable make_slot_table(const ModelLayout& model, const std::vector<std::size_t>& flat_bytes,
                                        bool shared_ring, int ring_slots);

/// Position of each unit among the repeated ones (0, 1, ...), -1 for the others.
[[nodiscard]] std::vector<int> ring_positions(const ModelLayout& model);

}  // namespace zeroth
