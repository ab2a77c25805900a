#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/zero/model_layout.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace zeroth {
namespace {

void require_box(const ParamSpec& param) {
  if (param.logical_shape.empty() && param.box_offset.empty()) return;
  const std::size_t dims = param.shape.size();
  bool fits = param.logical_shape.size() == dims && param.box_offset.size() == dims;
  const bool parted = param.box_parts != 1;
  fits = fits && param.box_parts >= 1 &&
         (!parted || (param.box_parts_dim >= 0 && param.box_parts_dim < static_cast<int>(dims)));
  for (std::size_t dim = 0; fits && dim < dims; ++dim) {
    if (parted && static_cast<int>(dim) == param.box_parts_dim) {
      const std::int64_t own = param.shape[dim] / param.box_parts;
      const std::int64_t block = param.logical_shape[dim] / param.box_parts;
      fits = own * param.box_parts == param.shape[dim] && block * param.box_parts == param.logical_shape[dim] &&
             param.box_offset[dim] >= 0 && own <= block && param.box_offset[dim] <= block - own;
      continue;
    }
    fits = param.box_offset[dim] >= 0 && param.shape[dim] >= 0 && param.shape[dim] <= param.logical_shape[dim] &&
           param.box_offset[dim] <= param.logical_shape[dim] - param.shape[dim];
  }
  ZR_CHECK(fits, ErrorCode::kModel, "a parameter is no box of its tensor",
           {.where = "zero.model_layout",
            .which = param.name,
            .expected = "offset and shape inside " + shape_text(param.logical_shape),
            .got = shape_text(param.shape) + " at " + shape_text(param.box_offset)});
}

}  // namespace

std::string ModelLayout::describe_param(int param) const {
  const ParamSpec& spec = params[static_cast<std::size_t>(param)];
  std::string text = spec.name + " " + std::string(name_of(spec.dtype)) + " " + shape_text(spec.shape);
  text += spec.trainable ? " trainable" : " frozen";
  text += " group " + std::to_string(spec.group);
  if (spec.shard_group != 0) text += " shard group " + std::to_string(spec.shard_group);
  if (spec.grad_factor != 1.0) text += " grad_factor " + hex_float(spec.grad_factor);
  if (!spec.whole.empty()) text += " a part of " + spec.whole;
  for (const std::string& alias : spec.aliases) text += " tied to " + alias;
  if (!spec.logical_shape.empty())
    text += " at " + shape_text(spec.box_offset) + " of " + shape_text(spec.logical_shape);
  if (spec.box_parts != 1)
    text += " in " + std::to_string(spec.box_parts) + " blocks of dimension " + std::to_string(spec.box_parts_dim);
  if (!spec.memory_order.empty()) {
    text += " dimensions in memory";
    for (const int dim : spec.memory_order) text += " " + std::to_string(dim);
  }
  const UnitSpec& unit = units[static_cast<std::size_t>(places[static_cast<std::size_t>(param)].unit)];
  text += (unit.repeated ? " repeated unit " : " unit ") + unit.name;
  return text;
}

namespace {

/// A unit's parameters by shard group, in their order; one without parameters is in group 0.
std::map<int, UnitSpec> parts_by_group(const std::vector<ParamSpec>& params, const UnitSpec& unit) {
  std::map<int, UnitSpec> parts;
  for (const int param : unit.params) {
    const int group = params[static_cast<std::size_t>(param)].shard_group;
    UnitSpec& part = parts.try_emplace(group, UnitSpec{.name = unit.name, .repeated = unit.repeated, .uses = unit.uses})
                         .first->second;
    part.params.push_back(param);
  }
  if (parts.empty()) parts.emplace(0, unit);
  return parts;
}

}  // namespace

ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, int world) {
  return make_model_layout(std::move(params), std::move(units), Degrees{.world = world});
}

ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units, const Degrees& degrees) {
  return make_model_layout(std::move(params), std::move(units), std::span(&degrees, 1));
}

ModelLayout make_model_layout(std::vector<ParamSpec> params, std::vector<UnitSpec> units,
                              std::span<const Degrees> degrees) {
  ModelLayout model;
  model.params = std::move(params);
  model.units = std::move(units);
  model.world = std::ranges::max(degrees, {}, &Degrees::world).world;
  model.places.resize(model.params.size());
  std::unordered_set<std::string> names;
  for (const ParamSpec& param : model.params) {
    ZR_CHECK(names.insert(param.name).second, ErrorCode::kModel, "two parameters have the same name",
             {.where = "zero.model_layout", .which = param.name});
    require_box(param);
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
    for (const auto& [group, part] : parts_by_group(model.params, spec)) {
      ZR_CHECK(group >= 0 && static_cast<std::size_t>(group) < degrees.size(), ErrorCode::kUsage,
               "a parameter is in a shard group that does not exist",
               {.where = "zero.model_layout",
                .which = part.params.empty() ? spec.name : model.params[static_cast<std::size_t>(part.params[0])].name,
                .expected = "0 to " + std::to_string(degrees.size() - 1),
                .got = std::to_string(group)});
      const Degrees& of_group = degrees[static_cast<std::size_t>(group)];
      const std::array<int, 4> below_the_world{of_group.parameter, of_group.optimizer, of_group.gradient,
                                               of_group.node};
      for (FlatLayout& layout :
           make_flat_layouts(model.params, part, static_cast<int>(unit), of_group.world, below_the_world)) {
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
  }
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    ZR_CHECK(model.places[param].unit >= 0, ErrorCode::kModel, "a parameter belongs to no unit",
             {.where = "zero.model_layout", .which = model.params[param].name});
  }
  return model;
}

ModelParts split_model(const ModelLayout& model, std::span<const Degrees> degrees) {
  ModelParts split;
  split.parts.resize(degrees.size());
  split.params.resize(model.params.size());
  for (std::size_t group = 0; group < degrees.size(); ++group) split.parts[group].layout.world = degrees[group].world;
  const auto next = [](const std::vector<int>& numbers) { return static_cast<int>(numbers.size()); };
  for (std::size_t param = 0; param < model.params.size(); ++param) {
    const int group = model.params[param].shard_group;
    ModelPart& part = split.parts[static_cast<std::size_t>(group)];
    split.params[param] = {group, next(part.params)};
    part.params.push_back(static_cast<int>(param));
    part.layout.params.push_back(model.params[param]);
  }
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    split.units.emplace_back();
    for (auto& [group, spec] : parts_by_group(model.params, model.units[unit])) {
      ModelPart& part = split.parts[static_cast<std::size_t>(group)];
      split.units.back().push_back({group, next(part.units)});
      part.units.push_back(static_cast<int>(unit));
      for (int& param : spec.params) param = split.params[static_cast<std::size_t>(param)].index;
      part.layout.units.push_back(std::move(spec));
      part.layout.unit_flats.emplace_back();
    }
    for (const int flat : model.unit_flats[unit]) {
      const PartIndex first = split.params[static_cast<std::size_t>(model.flat(flat).segments.at(0).param)];
      ModelPart& part = split.parts[static_cast<std::size_t>(first.part)];
      part.layout.unit_flats.back().push_back(next(part.flats));
      split.flats.push_back({first.part, next(part.flats)});
      part.flats.push_back(flat);
      FlatLayout& layout = part.layout.flats.emplace_back(model.flat(flat));
      layout.unit = next(part.units) - 1;
      for (Segment& segment : layout.segments)
        segment.param = split.params[static_cast<std::size_t>(segment.param)].index;
    }
  }
  for (ModelPart& part : split.parts) {
    for (const int param : part.params) {
      ParamPlace place = model.places[static_cast<std::size_t>(param)];
      const std::vector<PartIndex>& parts = split.units[static_cast<std::size_t>(place.unit)];
      const int group = model.params[static_cast<std::size_t>(param)].shard_group;
      place.unit = std::ranges::find(parts, group, &PartIndex::part)->index;
      if (place.flat >= 0) place.flat = split.flats[static_cast<std::size_t>(place.flat)].index;
      part.layout.places.push_back(place);
    }
  }
  return split;
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
