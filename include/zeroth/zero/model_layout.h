// ModelLayout: parameters, units, flat buffers and slots of one model on one group of ranks. A pure value, equal on all
// ranks.
#pragma once

#include <zeroth/device/memory.h>
#include <zeroth/shard/flat_layout.h>
#include <zeroth/shard/param_spec.h>
#include <zeroth/zero/plan.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

/// The position of one parameter in the layout.
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
  std::vector<ParamPlace> places{};            ///< one per parameter
  int world = 1;  ///< ranks that the flats are cut for; of a model in several parts, the most of any

  [[nodiscard]] const Segment& segment(int param) const {
    const ParamPlace& place = places[static_cast<std::size_t>(param)];
    return flats[static_cast<std::size_t>(place.flat)].segments[static_cast<std::size_t>(place.segment)];
  }
  [[nodiscard]] const FlatLayout& flat(int index) const { return flats[static_cast<std::size_t>(index)]; }
  /// One readable line with the properties of a parameter that must be equal on all ranks.
  [[nodiscard]] std::string describe_param(int param) const;
  bool operator==(const ModelLayout&) const = default;
};

/// Makes the layout for plans with these degrees; a layout without degrees fits all plans without degrees. Throws
/// kModel, with the name, unless every parameter is in exactly one unit and all names are unique.
[[nodiscard]] ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units,
                                            const Degrees& degrees);
/// The layout of a model whose parameters have plans of their own: `degrees[ParamSpec::shard_group]` of each. Throws
/// kUsage for a group that has none.
[[nodiscard]] ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units,
                                            std::span<const Degrees> degrees);
/// The layout for plans that split each state over all ranks or not at all.
[[nodiscard]] ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, int world);

/// The parameters of one shard group as a model of their own, with numbers from 0, and the numbers that the whole model
/// has for them. A unit with parameters of several groups has a part in each.
struct ModelPart {
  ModelLayout layout{};
  std::vector<int> params{};
  std::vector<int> units{};
  std::vector<int> flats{};
};

/// The number of a parameter, unit or flat of the whole model in its part.
struct PartIndex {
  int part = 0;
  int index = 0;
  bool operator==(const PartIndex&) const = default;
};

/// A model cut into the parts of its shard groups.
struct ModelParts {
  std::vector<ModelPart> parts{};
  std::vector<PartIndex> params{};              ///< one for each of the whole model, as the next two
  std::vector<std::vector<PartIndex>> units{};  ///< its parts, by group; one without parameters is in group 0
  std::vector<PartIndex> flats{};
};

/// One part for each of `degrees`, in the order of the whole model; a part without parameters may be empty.
[[nodiscard]] ModelParts split_model(const ModelLayout& model, std::span<const Degrees> degrees);

/// Memory slots that units use in turn. The slot of a unit never changes.
struct SlotTable {
  std::vector<std::size_t> slot_bytes{};   ///< one per slot, a multiple of kSegmentAlignBytes
  std::vector<int> unit_slot{};            ///< one per unit; -1: the unit needs no slot
  std::vector<std::size_t> flat_offset{};  ///< one per flat, bytes inside its unit's slot

  [[nodiscard]] std::size_t total_bytes() const;
  /// Byte offset of the slot of `unit`, if slots lie one after the other.
  [[nodiscard]] std::size_t slot_offset(int unit) const;
  bool operator==(const SlotTable&) const = default;
};

/// Slots for `flat_bytes`, one size per flat (0: the flat has no memory there). With `shared_ring`, repeated units
/// share min(ring_slots, number of repeated units) slots: unit i of them has slot i modulo that number. Every other
/// unit has its own slot.
[[nodiscard]] SlotTable make_slot_table(const ModelLayout& model, const std::vector<std::size_t>& flat_bytes,
                                        bool shared_ring, int ring_slots);

/// Position of each unit among the repeated ones (0, 1, ...), -1 for the others.
[[nodiscard]] std::vector<int> ring_positions(const ModelLayout& model);

}  // namespace zeroth
