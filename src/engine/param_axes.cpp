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

int num_stages_of(const MeshSpec& mesh) {
  const auto axis = std::ranges::find(mesh.axes, kPipelineAxis, &MeshAxis::name);
  return axis == mesh.axes.end() ? 1 : axis->size;
}

void require_stages(const ParamAxes& axes, int num_stages, const std::string& param) {
  for (std::size_t at = 0; at < axes.stages.size(); ++at) {
    const int stage = axes.stages[at];
    ZR_CHECK(stage >= 0 && stage < num_stages && (at == 0 || axes.stages[at - 1] < stage), ErrorCode::kConfig,
             "a parameter is on a stage that the mesh has not",
             {.where = kWhere,
              .which = param + ", stage " + std::to_string(stage),
              .expected = "0 to " + std::to_string(num_stages - 1) + ", ascending"});
  }
}

}  // namespace

void group_by_axes(std::span<ParamSpec> params, std::span<const ParamAxes> axes, EngineSettings& settings) {
  ZR_ASSERT(params.size() == axes.size(), "axes for each parameter");
  const Factors factors(settings.mesh, params, axes);
  const int num_stages = num_stages_of(settings.mesh);
  struct Kind {
    std::vector<std::string> distinct;
    std::vector<std::string> summed;
    std::vector<int> stages;  ///< empty: pp is distinct or summed as a whole
    auto operator<=>(const Kind&) const = default;
  };
  std::map<Kind, std::vector<std::size_t>> members;
  for (std::size_t param = 0; param < params.size(); ++param) {
    const ParamAxes& own = axes[param];
    for (const std::string& axis : own.summed) (void)size_of_axis(settings.mesh, axis, params[param].name);
    require_stages(own, num_stages, params[param].name);
    const bool everywhere = own.stages.empty() || static_cast<int>(own.stages.size()) == num_stages;
    // As a parameter of one stage: its ranks have no part of what others have.
    const bool one_stage = num_stages > 1 && (own.stages.size() == 1 || own.distinct == kPipelineAxis);
    const std::vector<std::string> stage_axis{std::string(kPipelineAxis)};
    const std::vector<std::string> no_axes;
    const std::vector<std::string> outside = factors.names(own.distinct, own.copies, /*inside=*/false);
    const std::vector<std::string> inside = factors.names(own.distinct, own.copies, /*inside=*/true);
    std::vector<std::string> of_plan = settings.plan.axes;
    std::erase(of_plan, own.distinct);
    for (const std::string& axis : own.further) {
      (void)size_of_axis(settings.mesh, axis, params[param].name);
      std::erase(of_plan, axis);
    }
    Kind kind{in_order(factors.mesh(), {outside, factors.names(own.further), one_stage ? stage_axis : no_axes}),
              in_order(factors.mesh(),
                       {factors.names(of_plan), factors.names(own.summed), inside, one_stage ? no_axes : stage_axis}),
              everywhere || one_stage ? std::vector<int>() : own.stages};
    members[std::move(kind)].push_back(param);
  }
  const std::vector<std::string> batch_axes = factors.names(settings.batch_axes);
  settings.mesh = factors.mesh();
  settings.batch_axes = batch_axes;
  settings.shard_groups.clear();
  for (const auto& [kind, own] : members) {  // in the order of the names: the same on all ranks
    ShardGroupSpec group{.name = kind.distinct.empty() ? "whole" : "split along " + join(kind.distinct, " and "),
                         .plan = settings.plan,
                         .distinct_axes = kind.distinct};
    if (!kind.stages.empty()) {
      std::vector<std::string> numbers;
      for (const int stage : kind.stages) numbers.push_back(std::to_string(stage));
      group.name += " of stages " + join(numbers, " and ");
      group.members = {.axis = std::string(kPipelineAxis), .coordinates = kind.stages};
    }
    group.plan.axes = kind.summed;
    // Stages that wait for each other inside of a backward would never end: see GradientStore::steer().
    const bool spans_stages = num_stages > 1 && std::ranges::find(kind.summed, kPipelineAxis) != kind.summed.end();
    if (spans_stages) {
      group.plan.policy = ReductionPolicy::kPerStep;
      // So would those that gather parameters from each other. The pipeline's axis is the outermost: a stage's ranks
      // are neighbours in the group.
      int ranks_of_stage = 1;
      for (const MeshAxis& axis : settings.mesh.axes) {
        if (axis.name != kPipelineAxis && std::ranges::find(kind.summed, axis.name) != kind.summed.end())
          ranks_of_stage *= axis.size;
      }
      if (group.plan.parameter == Placement::kFlat && group.plan.parameter_degree == 0)
        group.plan.parameter_degree = ranks_of_stage;
    }
    for (const std::size_t param : own) params[param].shard_group = static_cast<int>(settings.shard_groups.size());
    settings.shard_groups.push_back(std::move(group));
  }
}

}  // namespace zeroth
