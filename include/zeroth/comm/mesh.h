// Mesh: the world's ranks as a grid with named axes. Sums over a group of the mesh are formed along the nodes of its
// ranks (CommBackend::node_sizes()).
#pragma once

#include <zeroth/comm/communicator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct MeshAxis {
  std::string name{};
  int size = 1;
  bool operator==(const MeshAxis&) const = default;
};

/// Axes from outer to inner, as in a C array: rank = ((c0 * s1) + c1) * s2 + ...
struct MeshSpec {
  std::vector<MeshAxis> axes{};
  bool operator==(const MeshSpec&) const = default;
};

/// "dp=2 tp=2".
[[nodiscard]] std::string describe(const MeshSpec& spec);

/// Throws kConfig if the sizes do not multiply to the world, or names repeat.
void validate(const MeshSpec& spec, int world_size);

/// The place of one rank in a mesh. A value; makes no call. `axes`: names of axes in any order. All calls throw kUsage,
/// with the names of all axes, for a name that the mesh does not have.
class MeshPlace {
 public:
  /// Throws the errors of validate().
  MeshPlace(MeshSpec spec, int rank, int world_size);

  [[nodiscard]] const MeshSpec& spec() const { return spec_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size(std::string_view axis) const;
  /// Coordinate along the axis, from 0.
  [[nodiscard]] int coordinate(std::string_view axis) const;
  /// Number of ranks that differ from this one along `axes` only, this one included.
  [[nodiscard]] int size(std::span<const std::string> axes) const;
  /// A number that those ranks have and no other rank has.
  [[nodiscard]] int color(std::span<const std::string> axes) const;
  /// The first of them, in world order.
  [[nodiscard]] bool is_first(std::span<const std::string> axes) const;
  /// "dp*sp": the names in the order of the mesh.
  [[nodiscard]] std::string name(std::span<const std::string> axes) const;
  /// One entry for each axis of the mesh: whether it is in `axes`.
  [[nodiscard]] std::vector<bool> chosen(std::span<const std::string> axes) const;

 private:
  [[nodiscard]] std::size_t index_of(std::string_view axis) const;

  MeshSpec spec_;
  int rank_;
  std::vector<int> coordinates_;
};

/// The groups of one rank in a mesh. Move-only. Shares the world's group and owns one group for every axis that is
/// smaller than the world.
class Mesh {
 public:
  /// Collective, blocks. Throws the errors of validate(), and kMismatch if ranks give different axes.
  Mesh(std::shared_ptr<CommBackend> world, MeshSpec spec);

  [[nodiscard]] const MeshPlace& place() const { return place_; }
  [[nodiscard]] const MeshSpec& spec() const { return place_.spec(); }
  [[nodiscard]] int size(std::string_view axis) const { return place_.size(axis); }
  /// This rank's coordinate along the axis, from 0.
  [[nodiscard]] int coordinate(std::string_view axis) const { return place_.coordinate(axis); }
  [[nodiscard]] Communicator world() const { return Communicator(world_); }
  /// The group of ranks that differ from this one along `axis` only. Throws kUsage with the names of all axes.
  [[nodiscard]] Communicator axis(std::string_view axis) const;
  /// The ranks that differ along these axes only, as one flat group in world order. The first call with a list is
  /// collective over the world and blocks.
  [[nodiscard]] Communicator axes(std::span<const std::string> names);
  /// Payload bytes that this rank has received along each axis (received.h). An axis of all ranks counts world()'s
  /// calls as well; calls of axes() with several names are counted in their group.
  [[nodiscard]] std::map<std::string, std::uint64_t> received() const;
  /// Forgets what was counted in all groups of the mesh.
  void reset_received() const;

 private:
  [[nodiscard]] std::shared_ptr<CommBackend> make_group(std::span<const std::string> axes);

  std::shared_ptr<CommBackend> world_;
  MeshPlace place_;
  std::map<std::vector<bool>, std::shared_ptr<CommBackend>> groups_;
};

}  // namespace zeroth
