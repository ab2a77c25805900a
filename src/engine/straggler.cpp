#include "engine/straggler.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

namespace zeroth {
namespace {

template <class T>
T median_of(std::vector<T> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Some time of each rank, and the median of the others'.
struct Usual {
  std::vector<std::int64_t> own{};
  std::vector<std::int64_t> of_others{};
};
template <class Time>
Usual usual_of(std::span<const StepTimes> times, Time time_of) {
  Usual usual;
  for (const StepTimes& rank : times) usual.own.push_back(std::invoke(time_of, rank));
  std::vector<std::int64_t> sorted = usual.own;
  std::ranges::sort(sorted);
  const std::size_t middle = (sorted.size() - 1) / 2;  // of all but one
  for (const std::int64_t time : usual.own)
    usual.of_others.push_back(sorted[time <= sorted[middle] ? middle + 1 : middle]);
  return usual;
}

struct Part {
  std::int64_t StepTimes::* time;
  std::string_view phase;
};
constexpr std::array kParts{Part{&StepTimes::between_us, "between steps"},
                            Part{&StepTimes::forward_us, "in the forward"},
                            Part{&StepTimes::backward_us, "in the backward"}, Part{&StepTimes::step_us, "in step()"}};

}  // namespace

std::string describe(const Straggler& slow) {
  return fmt::format(
      "rank {} is slow: it computes {:.2f} times as long as the others, over {} steps, most of it {} ({:.1f} "
      "ms a step more); they wait for it",
      slow.rank, slow.ratio, slow.steps, slow.phase, static_cast<double>(slow.excess_us) / 1'000);
}

std::vector<StragglerDetector::Lag> StragglerDetector::lags_of(std::span<const StepTimes> times) {
  const Usual usual = usual_of(times, &StepTimes::computed_us);
  std::vector<Lag> lags;
  lags.reserve(times.size());
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    const std::int64_t typical = std::max<std::int64_t>(1, usual.of_others[rank]);
    lags.push_back({static_cast<double>(usual.own[rank]) / static_cast<double>(typical), usual.own[rank] - typical});
  }
  return lags;
}

std::optional<Straggler> StragglerDetector::observe(std::span<const StepTimes> times) {
  if (times.size() < 2) return std::nullopt;
  steps_.push_back({.times = {times.begin(), times.end()}, .lags = lags_of(times)});
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
  for (std::size_t rank = 0; rank < steps_.front().lags.size(); ++rank) {
    std::size_t outliers = 0;
    for (const Step& step : steps_) outliers += step.lags[rank].ratio < kEachRatio ? 1 : 0;
    if (outliers > kOutliers) continue;
    std::vector<double> ratios;
    std::vector<std::int64_t> excess;
    for (const Step& step : steps_) {
      ratios.push_back(step.lags[rank].ratio);
      excess.push_back(step.lags[rank].excess_us);
    }
    const double typical = median_of(ratios);
    if (typical < kRatio || median_of(excess) < kLeastExcess_us) continue;
    if (!worst || typical > worst->ratio) worst = Straggler{static_cast<int>(rank), typical, static_cast<int>(kWindow)};
  }
  if (worst) find_phase(*worst);
  return worst;
}

void StragglerDetector::find_phase(Straggler& slow) const {
  const auto rank = static_cast<std::size_t>(slow.rank);
  for (const Part& part : kParts) {
    std::vector<std::int64_t> excess;
    for (const Step& step : steps_) {
      const Usual usual = usual_of(step.times, part.time);
      excess.push_back(usual.own[rank] - usual.of_others[rank]);
    }
    const std::int64_t typical = median_of(std::move(excess));
    if (!slow.phase.empty() && typical <= slow.excess_us) continue;
    slow.phase = part.phase;
    slow.excess_us = typical;
  }
}

}  // namespace zeroth
