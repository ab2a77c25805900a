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

/// Of each rank, beside the median of the others.
std::vector<StragglerDetector::Lag> lags_of(std::span<const std::int64_t> times) {
  std::vector<std::int64_t> sorted(times.begin(), times.end());
  std::ranges::sort(sorted);
  const std::size_t middle = (sorted.size() - 1) / 2;  // of all but one
  std::vector<StragglerDetector::Lag> lags;
  lags.reserve(times.size());
  for (const std::int64_t time : times) {
    const std::int64_t typical = std::max<std::int64_t>(1, sorted[time <= sorted[middle] ? middle + 1 : middle]);
    lags.push_back({static_cast<double>(time) / static_cast<double>(typical), time - typical});
  }
  return lags;
}

}  // namespace

std::optional<Straggler> StragglerDetector::observe(std::span<const std::int64_t> compute_us) {
  if (compute_us.size() < 2) return std::nullopt;
  steps_.push_back(lags_of(compute_us));
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
    std::size_t outliers = 0;
    for (const std::vector<Lag>& step : steps_) outliers += step[rank].ratio < kEachRatio ? 1 : 0;
    if (outliers > kOutliers) continue;
    std::vector<double> ratios;
    std::vector<std::int64_t> excess;
    for (const std::vector<Lag>& step : steps_) {
      ratios.push_back(step[rank].ratio);
      excess.push_back(step[rank].excess_us);
    }
    const double typical = median_of(ratios);
    if (typical < kRatio || median_of(excess) < kLeastExcess_us) continue;
    if (!worst || typical > worst->ratio) worst = Straggler{static_cast<int>(rank), typical, static_cast<int>(kWindow)};
  }
  return worst;
}

}  // namespace zeroth
