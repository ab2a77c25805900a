#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/zero/model_layout.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_set>

namespace zeroth {

std::string ModelLayout::describe_param(int param) const {
  const ParamSpec& spec = params[static_cast<std::size_t>(param)];
  std::string text = spec.name + " " + std::string(name_of(spec.dtype)) + " [";
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(spec.shape[dim]);
  }
  text += spec.trainable ? "] trainable" : "] frozen";
  text += " group " + std::to_string(spec.group);
  if (spec.grad_factor != 1.0) text += " grad_factor " + hex_float(spec.grad_factor);
  for (const std::string& alias : spec.aliases) text += " tied to " + alias;
  const UnitSpec& unit = units[static_cast<std::size_t>(places[static_cast<std::size_t>(param)].unit)];
  text += (unit.repeated ? " repeated unit " : " unit ") + unit.name;
  return text;
}

ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, int world) {
  return make_model_layout(std::move(params), std::move(units), Degrees{.world = world});
}

ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, const Degrees& degrees) {
  const std::array<int, 3> below_the_world{degrees.parameter, degrees.optimizer, degrees.gradient};
  ModelLayout model;
  model.params = std::move(params);
  model.units = std::move(units);
  model.world = degrees.world;
  model.places.resize(model.params.size());
  std::unordered_set<std::string> names;
  for (const ParamSpec& param : model.params) {
    ZR_CHECK(names.insert(param.name).second, ErrorCode::kModel, "two parameters have the same name",
             {.where = "zero.model_layout", .which = param.name});
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    const UnitSpec& spec = model.units[unit];
    model.unit_flats.emplace_back();
    for (const int param : spec.params) {
      ZR_CHECK(param >= 0 && static_cast<std::size_t>(param) < model.params.size(), ErrorCode::kUsage,
               "a unit names a parameter that does not exist",
               {.where = "zero.model_layout", .which = spec.name, .got = std::to_string(param)});
      ParamPlace& place = model.places[static_cast<std::size_t>(param)];
      ZR_CHECK(
          place.unit < 0, ErrorCode::kModel, "a parameter belongs to two units",
          {.where = "zero.model_layout",
           .which = model.params[static_cast<std::size_t>(param)].name,
           .expected = "one unit",
           .got = place.unit < 0 ? "" : model.units[static_cast<std::size_t>(place.unit)].name + " and " + spec.name});
      place.unit = static_cast<int>(unit);
    }
    for (FlatLayout& layout :
         make_flat_layouts(model.params, spec, static_cast<int>(unit), degrees.world, below_the_world)) {
      const int index = static_cast<int>(model.flats.size());
      for (std::size_t segment = 0; segment < layout.segments.size(); ++segment) {
        ParamPlace& place = model.places[static_cast<std::size_t>(layout.segments[segment].param)];
        place.flat = index;
        place.segment = static_cast<int>(segment);
      }
      model.unit_flats.back().push_back(index);
      model.flats.push_back(std::move(layout));
    }
  }
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    ZR_CHECK(model.places[param].unit >= 0, ErrorCode::kModel, "a parameter belongs to no unit",
             {.where = "zero.model_layout", .which = model.params[param].name});
  }
  return model;
}

std::size_t SlotTable::total_bytes() const {
  return std::accumulate(slot_bytes.begin(), slot_bytes.end(), std::size_t{0});
}

std::size_t SlotTable::slot_offset(int unit) const {
  const auto slot = static_cast<std::ptrdiff_t>(unit_slot[static_cast<std::size_t>(unit)]);
  return std::accumulate(slot_bytes.begin(), slot_bytes.begin() + slot, std::size_t{0});
}

std::vector<int> ring_positions(const ModelLayout& model) {
  std::vector<int> positions;
  int next = 0;
  for (const UnitSpec& unit : model.units) positions.push_back(unit.repeated ? next++ : -1);
  return positions;
}

SlotTable make_slot_table(const ModelLayout& model, const std::vector<std::size_t>& flat_bytes, bool shared_ring,
                          int ring_slots) {
  SlotTable table;
  table.unit_slot.assign(model.units.size(), -1);
  table.flat_offset.assign(model.flats.size(), 0);
  const std::vector<int> positions = ring_positions(model);
  std::vector<int> ring_slot_index(static_cast<std::size_t>(ring_slots), -1);
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    std::size_t bytes = 0;
    for (const int flat : model.unit_flats[unit]) {
      table.flat_offset[static_cast<std::size_t>(flat)] = bytes;
      bytes += flat_bytes[static_cast<std::size_t>(flat)];
    }
    if (bytes == 0) continue;
    int slot = -1;
    if (shared_ring && positions[unit] >= 0) {
      int& index = ring_slot_index[static_cast<std::size_t>(positions[unit] % ring_slots)];
      if (index < 0) {
        index = static_cast<int>(table.slot_bytes.size());
        table.slot_bytes.push_back(0);
      }
      slot = index;
    } else {
      slot = static_cast<int>(table.slot_bytes.size());
      table.slot_bytes.push_back(0);
    }
    std::size_t& slot_bytes = table.slot_bytes[static_cast<std::size_t>(slot)];
    slot_bytes = std::max(slot_bytes, bytes);
    table.unit_slot[unit] = slot;
  }
  return table;
}

}  // namespace zeroth
