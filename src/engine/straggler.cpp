#include "engine/straggler.h"

#include <algorithm>

namespace zeroth {
namespace {

template <class T>
T median_of(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Lag {
  double ratio;
  std::int64_t excess_us;
};

Lag lag_of(const std::vector<std::int64_t>& step, std::size_t rank) {
  std::vector<std::int64_t> others;
  for (std::size_t other = 0; other < step.size(); ++other) {
    if (other != rank) others.push_back(step[other]);
  }
  const std::int64_t typical = std::max<std::int64_t>(1, median_of(std::move(others)));
  return {static_cast<double>(step[rank]) / static_cast<double>(typical), step[rank] - typical};
}

}  // namespace

std::optional<Straggler> StragglerDetector::observe(std::span<const std::int64_t> compute_us) {
  if (compute_us.size() < 2) return std::nullopt;
  steps_.emplace_back(compute_us.begin(), compute_us.end());
  if (steps_.size() > kWindow) steps_.pop_front();
  const std::optional<Straggler> slow = slowest();
  if (named_ >= 0) {
    kept_up_ = slow && slow->rank == named_ ? 0 : kept_up_ + 1;
    if (kept_up_ >= kWindow) named_ = -1;
  }
  if (!slow || slow->rank == named_) return std::nullopt;
  named_ = slow->rank;
  kept_up_ = 0;
  return slow;
}

std::optional<Straggler> StragglerDetector::slowest() const {
  if (steps_.size() < kWindow) return std::nullopt;
  std::optional<Straggler> worst;
  for (std::size_t rank = 0; rank < steps_.front().size(); ++rank) {
    std::vector<double> ratios;
    std::vector<std::int64_t> excess;
    std::size_t outliers = 0;
    for (const std::vector<std::int64_t>& step : steps_) {
      const Lag lag = lag_of(step, rank);
      ratios.push_back(lag.ratio);
      excess.push_back(lag.excess_us);
      if (lag.ratio < kEachRatio) ++outliers;
    }
    const double typical = median_of(ratios);
    if (typical < kRatio || outliers > kOutliers || median_of(excess) < kLeastExcess_us) continue;
    if (!worst || typical > worst->ratio) worst = Straggler{static_cast<int>(rank), typical, static_cast<int>(kWindow)};
  }
  return worst;
}

}  // namespace zeroth
