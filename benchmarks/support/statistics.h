// Medians and their intervals, from few and skewed samples.
#pragma once

#include <cstddef>
#include <vector>

namespace zeroth::benchmarks {

struct Summary {
  double median = 0.0;
  double low = 0.0;  ///< 95 % interval of the median
  double high = 0.0;
  std::size_t samples = 0;
};

/// Of a non-empty list.
[[nodiscard]] double median(std::vector<double> values);
/// Median with its percentile-bootstrap interval (4,000 draws, fixed seed). All zero for an empty list.
/// Ref: Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
[[nodiscard]] Summary summarise(const std::vector<double>& values);

}  // namespace zeroth::benchmarks
