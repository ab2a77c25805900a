#include <zeroth/base/error.h>
#include <zeroth/program/compression_plan.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace zeroth {
namespace {

constexpr const char* kCompression = "program.compression_plan";
constexpr std::uint64_t kNoChoice = std::numeric_limits<std::uint64_t>::max();

void check_budget(std::span<const CompressionUnit> units, double budget, int steps) {
  const auto is_error = [](double x) { return std::isfinite(x) && x >= 0; };
  ZR_CHECK(is_error(budget) && steps >= 1, ErrorCode::kUsage, "no such budget of errors",
           {.where = kCompression,
            .expected = "a finite number from 0, in one part or more",
            .got = std::to_string(budget) + " in " + std::to_string(steps) + " parts"});
  for (const CompressionUnit& unit : units) {
    ZR_CHECK(!unit.levels.empty(), ErrorCode::kUsage, "a unit has no level of compression",
             {.where = kCompression, .which = unit.name, .expected = "one or more"});
    for (const CompressionLevel& level : unit.levels) {
      ZR_CHECK(is_error(level.squared_error), ErrorCode::kUsage, "the error of a level is not usable",
               {.where = kCompression,
                .which = unit.name,
                .expected = "a finite number from 0",
                .got = std::to_string(level.squared_error)});
    }
  }
}

/// The fewest whole parts that are no less than `error`; `most` + 1 if those are too many.
std::size_t error_parts(double error, double part, std::size_t most) {
  if (error == 0.0) return 0;
  if (part == 0.0 || error / part > static_cast<double>(most)) return most + 1;
  auto parts = static_cast<std::size_t>(std::ceil(error / part));
  while (static_cast<double>(parts) * part < error) ++parts;  // where the quotient was rounded down
  return parts;
}

/// Levels by dynamic programming over `capacity` parts; empty if there are none.
std::vector<int> levels_within(std::span<const CompressionUnit> units, double part, std::size_t capacity) {
  // least[e]: bytes of the first units with errors of e parts.
  std::vector<std::uint64_t> least(capacity + 1, kNoChoice);
  least[0] = 0;
  std::vector<std::vector<int>> chosen;
  std::vector<std::vector<std::size_t>> costs;
  for (const CompressionUnit& unit : units) {
    std::vector<std::uint64_t> next(capacity + 1, kNoChoice);
    std::vector<int> level_of(capacity + 1, -1);
    std::vector<std::size_t>& cost = costs.emplace_back();
    for (const CompressionLevel& level : unit.levels) cost.push_back(error_parts(level.squared_error, part, capacity));
    for (std::size_t level = 0; level < unit.levels.size(); ++level) {
      for (std::size_t before = 0; before + cost[level] <= capacity; ++before) {
        if (least[before] == kNoChoice) continue;
        const std::uint64_t bytes = least[before] + unit.levels[level].bytes;
        if (bytes < next[before + cost[level]]) {
          next[before + cost[level]] = bytes;
          level_of[before + cost[level]] = static_cast<int>(level);
        }
      }
    }
    least = std::move(next);
    chosen.push_back(std::move(level_of));
  }
  const auto best = std::min_element(least.begin(), least.end());  // the first: the least error
  if (*best == kNoChoice) return {};
  auto at = static_cast<std::size_t>(best - least.begin());
  std::vector<int> levels(units.size());
  for (std::size_t unit = units.size(); unit-- > 0;) {
    levels[unit] = chosen[unit][at];
    at -= costs[unit][static_cast<std::size_t>(levels[unit])];
  }
  return levels;
}

}  // namespace

CompressionPlan compression_of(std::span<const CompressionUnit> units, std::vector<int> levels) {
  ZR_CHECK(levels.size() == units.size(), ErrorCode::kUsage, "a plan is of other units",
           {.where = kCompression, .expected = std::to_string(units.size()), .got = std::to_string(levels.size())});
  CompressionPlan plan;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const auto count = static_cast<int>(units[unit].levels.size());
    ZR_CHECK(levels[unit] >= 0 && levels[unit] < count, ErrorCode::kUsage, "a unit has no such level",
             {.where = kCompression,
              .which = units[unit].name,
              .expected = "0 to " + std::to_string(count - 1),
              .got = std::to_string(levels[unit])});
    const CompressionLevel& level = units[unit].levels[static_cast<std::size_t>(levels[unit])];
    plan.bytes += level.bytes;
    plan.squared_error += level.squared_error;
  }
  plan.levels = std::move(levels);
  return plan;
}

double uniform_error(std::span<const CompressionUnit> units, int level) {
  std::vector<int> levels;
  for (const CompressionUnit& unit : units) levels.push_back(std::min(level, static_cast<int>(unit.levels.size()) - 1));
  return compression_of(units, std::move(levels)).squared_error;
}

CompressionPlan plan_compression(std::span<const CompressionUnit> units, double budget, int steps) {
  check_budget(units, budget, steps);
  if (units.empty()) return {};
  const double part = budget / steps;
  double least = 0.0;
  for (const CompressionUnit& unit : units) {
    least += std::min_element(unit.levels.begin(), unit.levels.end(), [](const auto& a, const auto& b) {
               return a.squared_error < b.squared_error;
             })->squared_error;
  }
  // Sums of doubles are rounded: one that is above the budget by this is planned again with a part less.
  for (auto capacity = static_cast<std::size_t>(steps);; --capacity) {
    std::vector<int> levels = levels_within(units, part, capacity);
    ZR_CHECK(!levels.empty(), ErrorCode::kUsage, "no levels of compression are within the budget of errors",
             {.where = kCompression,
              .expected = "at least " + std::to_string(least) + ", the sum of the most exact levels",
              .got = std::to_string(budget) + " in " + std::to_string(steps) + " parts",
              .hint = "errors are rounded up to parts: a level without compression has the error 0"});
    CompressionPlan plan = compression_of(units, std::move(levels));
    if (plan.squared_error <= budget || capacity == 0) return plan;
  }
}

}  // namespace zeroth
