#include <zeroth/base/text.h>
#include <zeroth/comm/mesh.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

namespace zeroth {

std::string describe(const MeshSpec& spec) {
  std::string text;
  for (const MeshAxis& axis : spec.axes)
    text += (text.empty() ? "" : " ") + axis.name + "=" + std::to_string(axis.size);
  return text;
}

void validate(const MeshSpec& spec, int world_size) {
  std::int64_t product = 1;
  std::set<std::string> names;
  for (const MeshAxis& axis : spec.axes) {
    ZR_CHECK(axis.size >= 1 && axis.size <= world_size && !axis.name.empty(), ErrorCode::kConfig,
             "a mesh axis needs a name and a size between 1 and the world size",
             {.where = "comm.mesh", .which = axis.name, .got = std::to_string(axis.size)});
    ZR_CHECK(names.insert(axis.name).second, ErrorCode::kConfig, "two mesh axes have one name",
             {.where = "comm.mesh", .which = axis.name});
    product *= axis.size;
    if (product > world_size) break;
  }
  ZR_CHECK(!spec.axes.empty() && product == world_size, ErrorCode::kConfig,
           "the axes of the mesh do not multiply to the world size",
           {.where = "comm.mesh",
            .which = describe(spec),
            .expected = std::to_string(world_size),
            .got = product > world_size ? "more than that" : std::to_string(product)});
}

Mesh::Mesh(std::shared_ptr<CommBackend> world, MeshSpec spec) : world_(std::move(world)), spec_(std::move(spec)) {
  validate(spec_, world_->size());
  Communicator(world_).barrier("mesh " + describe(spec_));  // ranks compare the name
  coordinates_.resize(spec_.axes.size());
  int rest = world_->rank();
  for (std::size_t axis = spec_.axes.size(); axis-- > 0;) {
    coordinates_[axis] = rest % spec_.axes[axis].size;
    rest /= spec_.axes[axis].size;
  }
  for (std::size_t axis = 0; axis < spec_.axes.size(); ++axis) {
    std::vector<bool> chosen(spec_.axes.size());
    chosen[axis] = true;
    groups_.emplace(chosen, make_group(chosen, spec_.axes[axis].name));
  }
}

std::size_t Mesh::index_of(std::string_view axis) const {
  for (std::size_t index = 0; index < spec_.axes.size(); ++index) {
    if (spec_.axes[index].name == axis) return index;
  }
  std::vector<std::string> names;
  for (const MeshAxis& known : spec_.axes) names.push_back(known.name);
  throw Error(ErrorCode::kUsage, "the mesh has no such axis",
              {.where = "comm.mesh", .which = std::string(axis), .expected = "one of " + join(names, ", ")});
}

int Mesh::size(std::string_view axis) const {
  return spec_.axes[index_of(axis)].size;
}

int Mesh::coordinate(std::string_view axis) const {
  return coordinates_[index_of(axis)];
}

Communicator Mesh::axis(std::string_view axis) const {
  std::vector<bool> chosen(spec_.axes.size());
  chosen[index_of(axis)] = true;
  return Communicator(groups_.at(chosen));
}

Communicator Mesh::axes(std::span<const std::string> names) {
  std::vector<bool> chosen(spec_.axes.size());
  for (const std::string& name : names) chosen[index_of(name)] = true;
  auto found = groups_.find(chosen);
  if (found == groups_.end()) {
    std::vector<std::string> ordered;
    for (std::size_t axis = 0; axis < chosen.size(); ++axis) {
      if (chosen[axis]) ordered.push_back(spec_.axes[axis].name);
    }
    found = groups_.emplace(chosen, make_group(chosen, join(ordered, "*"))).first;
  }
  return Communicator(found->second);
}

/// Ranks with equal coordinates on the axes that are not chosen form a group. A group of everybody is the
/// world's own group.
std::shared_ptr<CommBackend> Mesh::make_group(const std::vector<bool>& chosen, std::string_view name) {
  int color = 0;
  int members = 1;
  for (std::size_t axis = 0; axis < chosen.size(); ++axis) {
    if (chosen[axis]) {
      members *= spec_.axes[axis].size;
    } else {
      color = color * spec_.axes[axis].size + coordinates_[axis];
    }
  }
  if (members == world_->size()) return world_;
  return world_->split(color, world_->rank(), name);
}

}  // namespace zeroth
