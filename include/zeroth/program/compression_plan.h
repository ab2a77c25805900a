// Which unit is compressed how much: the fewest bytes whose error stays within a budget.
//
// Every unit has levels, each with the bytes that are sent at it and the error that was measured: the sum of squares of
// what the level leaves of the unit's gradient. Errors of units add up, as their elements are different ones.
//
//   minimise  sum of bytes   under  sum of errors <= budget
//
// By dynamic programming over the error in `steps` equal parts of the budget: O(units levels steps). A level's error
// counts as whole parts, rounded up, so the sum stays within the budget; at most one part a unit is given away.
// Ref: Alimohammadi, Markov, Frantar, Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient and
// Accurate Deep Learning", MLSys 2024, algorithm 1. There the budget is the error of one level for all units.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace zeroth {

struct CompressionLevel {
  std::uint64_t bytes = 0;
  double squared_error = 0.0;
};

struct CompressionUnit {
  std::string name{};
  std::vector<CompressionLevel> levels{};  ///< one or more; of equal cost the first is taken
};

struct CompressionPlan {
  std::vector<int> levels{};  ///< of each unit
  std::uint64_t bytes = 0;
  double squared_error = 0.0;  ///< summed in the order of the units; never above the budget

  friend bool operator==(const CompressionPlan&, const CompressionPlan&) = default;
};

/// What a choice of levels costs. Throws kUsage for a level that a unit does not have.
[[nodiscard]] CompressionPlan compression_of(std::span<const CompressionUnit> units, std::vector<int> levels);

/// The error if every unit has the level `level`, or its last one: a budget for plan_compression(), which then takes no
/// more bytes than that, but for what the rounding of errors gives away.
[[nodiscard]] double uniform_error(std::span<const CompressionUnit> units, int level);

/// The plan with the fewest bytes, of those the one with the least error in parts. Throws kUsage for a unit without
/// levels, errors or a budget that are negative or not finite, fewer than one part, and if even the most exact levels
/// exceed the budget.
[[nodiscard]] CompressionPlan plan_compression(std::span<const CompressionUnit> units, double budget,
                                               int steps = 10'000);

}  // namespace zeroth
