#include "engine/straggler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace zeroth {
namespace {

template <class T>
T median_of(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Of each rank, the median of the others'.
std::vector<std::int64_t> usual_of(const std::vector<std::int64_t>& times) {
  std::vector<std::int64_t> sorted = times;
  std::ranges::sort(sorted);
  const std::size_t middle = (sorted.size() - 1) / 2;  // of all but one
  std::vector<std::int64_t> usual;
  usual.reserve(times.size());
  for (const std::int64_t time : times) usual.push_back(sorted[time <= sorted[middle] ? middle + 1 : middle]);
  return usual;
}

struct Part {
  std::int64_t StepTimes::*time;
  std::string_view phase;
};
constexpr std::array kParts{Part{&StepTimes::between_us, "between steps"},
                            Part{&StepTimes::forward_us, "in the forward"},
                            Part{&StepTimes::backward_us, "in the backward"},
                            Part{&StepTimes::step_us, "in step()"}};

}  // namespace

std::string describe(const Straggler& slow) {
  return fmt::format(
      "rank {} is slow: it computes {:.2f} times as long as the others, over {} steps, most of it {} ({:.1f} "
      "ms a step more); they wait for it",
      slow.rank,
      slow.ratio,
      slow.steps,
      slow.phase,
      static_cast<double>(slow.excess_us) / 1'000);
}

std::vector<StragglerDetector::Lag> StragglerDetector::lags_of(std::span<const StepTimes> times) {
  std::vector<Lag> lags(times.size());
  std::vector<std::int64_t> of_ranks(times.size());
  std::ranges::transform(times, of_ranks.begin(), &StepTimes::computed_us);
  const std::vector<std::int64_t> usual = usual_of(of_ranks);
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    lags[rank].ratio =
        static_cast<double>(of_ranks[rank]) / static_cast<double>(std::max<std::int64_t>(1, usual[rank]));
    lags[rank].excess_us = of_ranks[rank] - usual[rank];
  }
  for (const Part& part : kParts) {
    std::ranges::transform(times, of_ranks.begin(), part.time);
    const std::vector<std::int64_t> usual_there = usual_of(of_ranks);
    for (std::size_t rank = 0; rank < times.size(); ++rank)
      lags[rank].excess.*part.time = of_ranks[rank] - usual_there[rank];
  }
  return lags;
}

std::optional<Straggler> StragglerDetector::observe(std::span<const StepTimes> times) {
  if (times.size() < 2) return std::nullopt;
  steps_.push_back(lags_of(times));
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
  if (!worst) return std::nullopt;
  for (const Part& part : kParts) {
    std::vector<std::int64_t> excess;
    for (const std::vector<Lag>& step : steps_)
      excess.push_back(step[static_cast<std::size_t>(worst->rank)].excess.*part.time);
    const std::int64_t typical = median_of(std::move(excess));
    if (worst->phase.empty() || typical > worst->excess_us) {
      worst->phase = part.phase;
      worst->excess_us = typical;
    }
  }
  return worst;
}

}  // namespace zeroth
