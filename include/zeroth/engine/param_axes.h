// ParamAxes: how the ranks of a mesh share one parameter; from these come the shard groups of an engine.
#pragma once

#include <zeroth/engine/engine.h>
#include <zeroth/shard/param_spec.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// The axis of a mesh along which ranks have other layers of a model.
inline constexpr std::string_view kPipelineAxis = "pp";
/// The axis of a mesh along which ranks have batches of their own, and other experts.
inline constexpr std::string_view kExpertAxis = "ep";

/// Beside the other axes of the plan, along which ranks have the same parameter and parts of its gradient. Along an
/// axis of the mesh that is neither there nor here, ranks have the same parameter and the same gradient.
struct ParamAxes {
  /// At most one axis: along it each rank has another box of the tensor. It may be one of the plan: its ranks then have
  /// batches of their own, and each has the gradient of all of them for its box, as of an expert to which the batches'
  /// tokens travel.
  std::string distinct{};
  /// So many neighbours along `distinct` have the same box, and parts of its gradient: key and value heads of which
  /// there are fewer than ranks. Divides the axis.
  int copies = 1;
  /// Axes beside `distinct` along which ranks have other boxes, too, without copies: experts over ep and tp.
  std::vector<std::string> further{};
  /// Along these, ranks have the same parameter and parts of its gradient, though their batches are the same: norms on
  /// a part of the sequence or of the heads.
  std::vector<std::string> summed{};
  /// Coordinates along the axis "pp" of the ranks that use the parameter, ascending; on the others its box has no
  /// elements. Several stages have parts of its gradient. Empty: all stages use it. With `distinct` = "pp" each stage
  /// has another box: rows of a head.
  std::vector<int> stages{};
  bool operator==(const ParamAxes&) const = default;
};

/// Makes `settings.shard_groups` from `settings.plan`, one for each kind of `axes` that occurs, and sets
/// ParamSpec::shard_group. An axis with copies is cut in `settings.mesh` into factors "tp.0", "tp.1", ... `axes`: one a
/// parameter. All ranks must have the same kinds. Throws kConfig for an axis that the mesh has not, and for copies that
/// do not divide it or each other.
void group_by_axes(std::span<ParamSpec> params, std::span<const ParamAxes> axes, EngineSettings& settings);

}  // namespace zeroth
