// Who is slow: from the time that each rank computed in each step, which the commit vote carries.
#pragma once

#include <zeroth/engine/step_result.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

struct Straggler {
  int rank = 0;
  double ratio = 1.0;          ///< of its time to the median of the others', typical for the window
  int steps = 0;               ///< of the window
  std::string_view phase{};    ///< in which it takes most of the time that it takes longer
  std::int64_t excess_us = 0;  ///< there, beyond the others, a step
};

/// "rank 1 is slow: it computes 1.25 times as long as the others, over 16 steps, most of it in the forward
/// (6.1 ms a step more); they wait for it".
[[nodiscard]] std::string describe(const Straggler& slow);

/// A pure value: the same on every rank, as what it is given is.
class StragglerDetector {
 public:
  static constexpr std::size_t kWindow = 16;  ///< steps that are looked at
  static constexpr double kRatio = 1.15;  ///< slow: in the median of the window; so that a rank that takes 1.2 of the
                                          ///< time is found in spite of noise
  static constexpr double kEachRatio = 1.05;              ///< and in nearly all of its steps
  static constexpr std::size_t kOutliers = 3;             ///< but so many
  static constexpr std::int64_t kLeastExcess_us = 1'000;  ///< below it a step is too short to be compared

  /// `times` of every rank in the step that has ended. Names a rank once, and again only after it has kept up
  /// for a whole window.
  [[nodiscard]] std::optional<Straggler> observe(std::span<const StepTimes> times);

 private:
  /// A rank's time in a step beside the median of the others'.
  struct Lag {
    double ratio = 1.0;
    std::int64_t excess_us = 0;
  };
  /// Of each rank.
  struct Step {
    std::vector<StepTimes> times{};
    std::vector<Lag> lags{};
  };
  [[nodiscard]] static std::vector<Lag> lags_of(std::span<const StepTimes> times);
  [[nodiscard]] std::optional<Straggler> slowest() const;
  /// Fills in the phase of a rank that is slow.
  void find_phase(Straggler& slow) const;

  std::deque<Step> steps_;
  int named_ = -1;
  std::size_t kept_up_ = 0;  ///< steps since the named one was slow
};

}  // namespace zeroth
