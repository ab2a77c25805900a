#include <zeroth/base/text.h>
#include <zeroth/comm/mesh.h>
#include <zeroth/comm/received.h>

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

MeshPlace::MeshPlace(MeshSpec spec, int rank, int world_size)
    : spec_(std::move(spec)), rank_(rank), coordinates_(spec_.axes.size()) {
  validate(spec_, world_size);
  int rest = rank_;
  for (std::size_t axis = spec_.axes.size(); axis-- > 0;) {
    coordinates_[axis] = rest % spec_.axes[axis].size;
    rest /= spec_.axes[axis].size;
  }
}

std::size_t MeshPlace::index_of(std::string_view axis) const {
  for (std::size_t index = 0; index < spec_.axes.size(); ++index) {
    if (spec_.axes[index].name == axis) return index;
  }
  std::vector<std::string> names;
  for (const MeshAxis& known : spec_.axes) names.push_back(known.name);
  throw Error(ErrorCode::kUsage, "the mesh has no such axis",
              {.where = "comm.mesh", .which = std::string(axis), .expected = "one of " + join(names, ", ")});
}

int MeshPlace::size(std::string_view axis) const {
  return spec_.axes[index_of(axis)].size;
}

int MeshPlace::coordinate(std::string_view axis) const {
  return coordinates_[index_of(axis)];
}

std::vector<bool> MeshPlace::chosen(std::span<const std::string> axes) const {
  std::vector<bool> chosen(spec_.axes.size());
  for (const std::string& name : axes) chosen[index_of(name)] = true;
  return chosen;
}

int MeshPlace::size(std::span<const std::string> axes) const {
  const std::vector<bool> in = chosen(axes);
  int ranks = 1;
  for (std::size_t axis = 0; axis < in.size(); ++axis) ranks *= in[axis] ? spec_.axes[axis].size : 1;
  return ranks;
}

int MeshPlace::color(std::span<const std::string> axes) const {
  const std::vector<bool> in = chosen(axes);
  int color = 0;
  for (std::size_t axis = 0; axis < in.size(); ++axis) {
    if (!in[axis]) color = color * spec_.axes[axis].size + coordinates_[axis];
  }
  return color;
}

bool MeshPlace::is_first(std::span<const std::string> axes) const {
  return std::ranges::all_of(axes, [this](const std::string& axis) { return coordinate(axis) == 0; });
}

std::string MeshPlace::name(std::span<const std::string> axes) const {
  const std::vector<bool> in = chosen(axes);
  std::vector<std::string> names;
  for (std::size_t axis = 0; axis < in.size(); ++axis) {
    if (in[axis]) names.push_back(spec_.axes[axis].name);
  }
  return join(names, "*");
}

Mesh::Mesh(std::shared_ptr<CommBackend> world, MeshSpec spec)
    : world_(std::move(world)), place_(std::move(spec), world_->rank(), world_->size()) {
  Communicator(world_).barrier("mesh " + describe(place_.spec()));  // ranks compare the name
  for (const MeshAxis& axis : place_.spec().axes) {
    const std::vector<std::string> one{axis.name};
    groups_.emplace(place_.chosen(one), make_group(one));
  }
}

Communicator Mesh::axis(std::string_view axis) const {
  return Communicator(groups_.at(place_.chosen(std::vector{std::string(axis)})));
}

Communicator Mesh::axes(std::span<const std::string> names) {
  const std::vector<bool> chosen = place_.chosen(names);
  auto found = groups_.find(chosen);
  if (found == groups_.end()) found = groups_.emplace(chosen, make_group(names)).first;
  return Communicator(found->second);
}

std::map<std::string, std::uint64_t> Mesh::received() const {
  std::map<std::string, std::uint64_t> bytes;
  for (const MeshAxis& one : spec().axes) bytes.emplace(one.name, received_bytes(axis(one.name)));
  return bytes;
}

void Mesh::reset_received() const {
  for (const auto& [chosen, group] : groups_) zeroth::reset_received(Communicator(group));
  zeroth::reset_received(world());
}

/// A group of everybody is the world's own group.
std::shared_ptr<CommBackend> Mesh::make_group(std::span<const std::string> axes) {
  if (place_.size(axes) == world_->size()) return world_;
  return world_->split(place_.color(axes), world_->rank(), place_.name(axes));
}

}  // namespace zeroth
