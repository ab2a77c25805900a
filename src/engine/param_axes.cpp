#include <zeroth/base/error.h>
#include <zeroth/base/text.h>
#include <zeroth/engine/param_axes.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kWhere = "engine.param_axes";

int size_of_axis(const MeshSpec& mesh, const std::string& axis, const std::string& param) {
  std::vector<std::string> names;
  for (const MeshAxis& one : mesh.axes) {
    if (one.name == axis) return one.size;
    names.push_back(one.name);
  }
  throw Error(ErrorCode::kConfig, "ranks share a parameter along an axis that the mesh has not",
              {.where = kWhere, .which = param + ", axis " + axis, .expected = "one of " + join(names, ", ")});
}

/// The axes of a mesh in factors: those that copies ask for.
class Factors {
 public:
  Factors(const MeshSpec& mesh, std::span<const ParamSpec> params, std::span<const ParamAxes> axes) {
    std::map<std::string, std::set<int>> copies;
    for (std::size_t param = 0; param < axes.size(); ++param) {
      if (axes[param].distinct.empty()) continue;
      const int size = size_of_axis(mesh, axes[param].distinct, params[param].name);
      ZR_CHECK(axes[param].copies >= 1 && size % axes[param].copies == 0, ErrorCode::kConfig,
               "the ranks of an axis do not divide into those with the same part of a parameter",
               {.where = kWhere,
                .which = params[param].name + ", axis " + axes[param].distinct,
                .expected = "a divisor of " + std::to_string(size),
                .got = std::to_string(axes[param].copies)});
      copies[axes[param].distinct].insert(axes[param].copies);
    }
    for (const MeshAxis& axis : mesh.axes) cut(axis, copies[axis.name]);
  }

  [[nodiscard]] const MeshSpec& mesh() const { return mesh_; }
  /// All factors of the axes, in the mesh's order.
  [[nodiscard]] std::vector<std::string> names(const std::vector<std::string>& axes) const {
    std::vector<std::string> result;
    for (const Factor& factor : factors_) {
      if (std::ranges::find(axes, factor.axis) != axes.end()) result.push_back(factor.name);
    }
    return result;
  }
  /// Of an axis: those along which ranks have other boxes, or those along which they have copies.
  [[nodiscard]] std::vector<std::string> names(const std::string& axis, int copies, bool inside) const {
    std::vector<std::string> result;
    for (const Factor& factor : factors_) {
      if (factor.axis == axis && (factor.ranks_inside < copies) == inside) result.push_back(factor.name);
    }
    return result;
  }

 private:
  struct Factor {
    std::string axis;
    std::string name;
    int ranks_inside;  ///< neighbours along the axis that differ in the factors inside of this one only
  };

  void cut(const MeshAxis& axis, std::set<int> copies) {
    copies.insert(1);
    copies.insert(axis.size);
    std::vector<int> inside(copies.begin(), copies.end());  // ascending
    if (inside.size() == 1) inside.push_back(axis.size);    // one rank: still an axis
    for (std::size_t at = inside.size() - 1; at-- > 0;) {
      ZR_CHECK(inside[at + 1] % inside[at] == 0, ErrorCode::kConfig,
               "parameters are copied in groups of an axis that do not lie in each other",
               {.where = kWhere,
                .which = "axis " + axis.name,
                .expected = "numbers of copies that divide each other",
                .got = std::to_string(inside[at]) + " and " + std::to_string(inside[at + 1])});
      const std::size_t number = inside.size() - 2 - at;
      const std::string name = inside.size() == 2 ? axis.name : axis.name + "." + std::to_string(number);
      factors_.push_back({.axis = axis.name, .name = name, .ranks_inside = inside[at]});
      mesh_.axes.push_back({.name = name, .size = inside[at + 1] / inside[at]});
    }
  }

  std::vector<Factor> factors_;
  MeshSpec mesh_;
};

std::vector<std::string> in_order(const MeshSpec& mesh, const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::string> result;
  for (const MeshAxis& axis : mesh.axes) {
    const bool wanted = std::ranges::any_of(
        lists, [&](const std::vector<std::string>& list) { return std::ranges::find(list, axis.name) != list.end(); });
    if (wanted) result.push_back(axis.name);
  }
  return result;
}

}  // namespace

void group_by_axes(std::span<ParamSpec> params, std::span<const ParamAxes> axes, EngineSettings& settings) {
  ZR_ASSERT(params.size() == axes.size(), "axes for each parameter");
  const Factors factors(settings.mesh, params, axes);
  using Kind = std::pair<std::vector<std::string>, std::vector<std::string>>;  // distinct axes, summed axes
  std::map<Kind, std::vector<std::size_t>> members;
  for (std::size_t param = 0; param < params.size(); ++param) {
    const ParamAxes& own = axes[param];
    for (const std::string& axis : own.summed) (void)size_of_axis(settings.mesh, axis, params[param].name);
    std::vector<std::string> outside = factors.names(own.distinct, own.copies, /*inside=*/false);
    std::vector<std::string> inside = factors.names(own.distinct, own.copies, /*inside=*/true);
    Kind kind{std::move(outside),
              in_order(factors.mesh(), {factors.names(settings.plan.axes), factors.names(own.summed), inside})};
    members[std::move(kind)].push_back(param);
  }
  const std::vector<std::string> batch_axes = factors.names(settings.batch_axes);
  settings.mesh = factors.mesh();
  settings.batch_axes = batch_axes;
  settings.shard_groups.clear();
  for (const auto& [kind, own] : members) {  // in the order of the names: the same on all ranks
    ShardGroupSpec group{.name = kind.first.empty() ? "whole" : "split along " + join(kind.first, " and "),
                         .plan = settings.plan,
                         .distinct_axes = kind.first};
    group.plan.axes = kind.second;
    for (const std::size_t param : own) params[param].shard_group = static_cast<int>(settings.shard_groups.size());
    settings.shard_groups.push_back(std::move(group));
  }
}

}  // namespace zeroth
