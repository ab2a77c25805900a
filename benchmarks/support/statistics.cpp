#include "support/statistics.h"

#include <algorithm>
#include <random>

namespace zeroth::benchmarks {

double median(std::vector<double> values) {
  const std::size_t half = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(half), values.end());
  const double upper = values[half];
  if (values.size() % 2 == 1) return upper;
  return (*std::max_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(half)) + upper) / 2;
}

Summary summarise(const std::vector<double>& values) {
  if (values.empty()) return {};
  constexpr std::size_t kDraws = 4000;
  std::mt19937_64 engine(1);
  std::vector<double> medians(kDraws);
  std::vector<double> sample(values.size());
  for (double& result : medians) {
    for (double& value : sample) value = values[engine() % values.size()];
    result = median(sample);
  }
  std::sort(medians.begin(), medians.end());
  return {.median = median(values),
          .low = medians[kDraws / 40],
          .high = medians[kDraws - 1 - kDraws / 40],
          .samples = values.size()};
}

}  // namespace zeroth::benchmarks
