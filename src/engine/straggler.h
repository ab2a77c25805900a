// Who is slow: from the time that each rank computed in each step, which the judge's message carries.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace zeroth {

struct Straggler {
  int rank = 0;
  double ratio = 1.0;  ///< of its time to the median of the others', typical for the window
  int steps = 0;       ///< of the window
};

/// A pure value: the same on every rank, as what it is given is.
class StragglerDetector {
 public:
  static constexpr std::size_t kWindow = 16;       ///< steps that are looked at
  static constexpr double kRatio = 1.2;            ///< slow: in the median of the window
  static constexpr double kEachRatio = 1.1;        ///< and in nearly all of its steps
  static constexpr std::size_t kOutliers = 2;      ///< but so many
  static constexpr std::int64_t kLeastExcess_us = 1'000;  ///< below it a step is too short to be compared

  /// `compute_us` of every rank in the step that has ended. Names a rank once, and again only after it has kept up for a whole window.
  [[nodiscard]] std::optional<Straggler> observe(std::span<const std::int64_t> compute_us);

 private:
  [[nodiscard]] std::optional<Straggler> slowest() const;

  std::deque<std::vector<std::int64_t>> steps_;
  int named_ = -1;
  std::size_t kept_up_ = 0;  ///< steps since the named one was slow
};

}  // namespace zeroth
