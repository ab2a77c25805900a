#include "engine/box_tiles.h"

#include "engine/texts.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {
namespace {

using BoxesJson = nlohmann::json;
using Extents = std::vector<std::int64_t>;

struct Box {
  int rank = 0;
  std::string param{};
  std::string tensor{};
  std::vector<int> place{};  ///< coordinates along the axes on which it should differ
  Extents shape{};
  Extents offset{};
  Extents logical{};
  int parts = 1;
  int parts_dim = 0;

  [[nodiscard]] bool is_same_box(const Box& other) const {
    return shape == other.shape && offset == other.offset && parts == other.parts && parts_dim == other.parts_dim;
  }
  /// Boxes of one form alone: of others only the sum of elements is known.
  [[nodiscard]] bool overlaps(const Box& other) const {
    if (parts != other.parts || parts_dim != other.parts_dim || offset.size() != other.offset.size()) return false;
    for (std::size_t dim = 0; dim < offset.size(); ++dim) {
      const auto end = [dim](const Box& box) {
        const bool cut = box.parts > 1 && static_cast<int>(dim) == box.parts_dim;
        return box.offset[dim] + box.shape[dim] / (cut ? box.parts : 1);
      };
      if (offset[dim] >= end(other) || other.offset[dim] >= end(*this)) return false;
    }
    return true;
  }
  [[nodiscard]] std::string text() const {
    return "rank " + std::to_string(rank) + " has " + shape_text(shape) + " at " + shape_text(offset) +
           (parts > 1 ? " in " + std::to_string(parts) + " blocks" : "");
  }
  [[nodiscard]] static std::int64_t product(const Extents& values) {
    std::int64_t count = 1;
    for (const std::int64_t value : values) count *= value;
    return count;
  }
};

std::vector<int> coordinates(const ShardGroupSpec& spec, const MeshPlace& place) {
  std::vector<int> result;
  for (const std::string& axis : spec.distinct_axes) result.push_back(place.coordinate(axis));
  return result;
}

/// Of this rank, where it speaks for the ranks of its group, which have the same boxes; as JSON.
std::string own_boxes(const ShardGroups& groups, int rank) {
  BoxesJson boxes = BoxesJson::array();
  for (std::size_t index = 0; index < groups.size(); ++index) {
    const GroupColors& colors = groups[index]->colors();
    const auto first = std::ranges::find(colors, colors[static_cast<std::size_t>(rank)]);
    if (first - colors.begin() != rank) continue;
    for (const ParamSpec& spec : groups[index]->layout().params) {
      if (spec.logical_shape.empty() || spec.numel() == 0) continue;
      boxes.push_back({index, spec.name, spec.tensor_name(), spec.shape, spec.box_offset, spec.logical_shape,
                       spec.box_parts, spec.box_parts_dim});
    }
  }
  return boxes.empty() ? "" : boxes.dump(-1, ' ', false, BoxesJson::error_handler_t::replace);
}

std::vector<Box> boxes_in(const std::vector<std::string>& texts, const ShardGroups& groups, const MeshPlace& place) {
  std::vector<Box> boxes;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    const MeshPlace its(place.spec(), static_cast<int>(rank), static_cast<int>(texts.size()));
    for (const BoxesJson& said : BoxesJson::parse(texts[rank])) {
      const ShardGroupSpec& spec = groups.at(said.at(0).get<std::size_t>())->spec();
      boxes.push_back({.rank = static_cast<int>(rank),
                       .param = said.at(1),
                       .tensor = said.at(2),
                       .place = coordinates(spec, its),
                       .shape = said.at(3),
                       .offset = said.at(4),
                       .logical = said.at(5),
                       .parts = said.at(6),
                       .parts_dim = said.at(7)});
    }
  }
  return boxes;
}

[[noreturn]] void refuse_boxes(const Box& box, const std::string& got, const MeshPlace& place) {
  int world = 1;
  for (const MeshAxis& axis : place.spec().axes) world *= axis.size;
  throw Error(ErrorCode::kMismatch, "the ranks' parts of a parameter do not make the whole of it, once",
              {.where = "engine.boxes",
               .who = "rank " + std::to_string(box.rank) + "/" + std::to_string(world),
               .which = box.param,
               .expected = "parts that cover " + shape_text(box.logical) + " without overlap along the mesh " +
                           describe(place.spec()),
               .got = got,
               .hint = "split the model along the mesh of the configuration: world.mesh(config) makes its groups"});
}

}  // namespace

void require_tiles(const ShardGroups& groups, const MeshPlace& place, const Communicator& communicator) {
  const bool any = std::ranges::any_of(groups, [](const auto& group) { return !group->spec().distinct_axes.empty(); });
  if (!any) return;  // on all ranks
  const std::vector<Box> boxes =
      boxes_in(gather_texts(own_boxes(groups, communicator.rank()), communicator), groups, place);

  // Each place along the axes has a box of its own, and always the same one.
  std::map<std::string, std::vector<const Box*>> of_param;
  std::map<std::string, std::vector<const Box*>> of_tensor;
  for (const Box& box : boxes) {
    std::vector<const Box*>& others = of_param[box.param];
    for (const Box* const other : others) {
      const bool same = box.is_same_box(*other);
      if (same == (box.place == other->place)) continue;
      refuse_boxes(box, other->text() + ", " + box.text(), place);
    }
    const bool known = std::ranges::any_of(others, [&](const Box* other) { return other->place == box.place; });
    if (known) continue;
    others.push_back(&box);
    of_tensor[box.tensor].push_back(&box);
  }
  // Together they are the tensor.
  for (const auto& [tensor, parts] : of_tensor) {
    std::int64_t elements = 0;
    for (std::size_t index = 0; index < parts.size(); ++index) {
      const Box& box = *parts[index];
      for (std::size_t other = 0; other < index; ++other) {
        if (box.overlaps(*parts[other])) refuse_boxes(box, parts[other]->text() + ", " + box.text(), place);
      }
      elements += Box::product(box.shape);
    }
    const std::int64_t whole = Box::product(parts.front()->logical);
    if (elements == whole) continue;
    refuse_boxes(*parts.front(),
                 "parts with " + std::to_string(elements) + " elements of " + std::to_string(whole) + "; " +
                     parts.front()->text(),
                 place);
  }
}

}  // namespace zeroth
