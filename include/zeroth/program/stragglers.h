// Steps of workers that are slow now and then, simulated: how long a step takes without a code, with gradient coding,
// and with sequential gradient coding.
//
//   plain        a worker has 1/n of the batch; a step ends when all have answered
//   coded        (s + 1)/n of it, see gradient_code.h; a step ends when n - s have answered, the rest is dropped
//   sequential   (s + 1)/n of it as well. A step ends when at most `most_missing` have not answered, so its gradient
//   may
//                lack some of the n - s answers. Those are asked for again `delay` steps later: as many workers as
//                are missing, that did not answer then, do the old step's work instead of the new one's. A step also
//                ends only when the step `delay` before it is complete. So gradients are exact, and `delay` steps late.
//                most_missing = s is `coded`.
//
// Ref: Krishnan, Ebrahimi, Khisti, "Sequential Gradient Coding for Straggler Mitigation", ICLR 2023, section 3.1
// (SR-SGC). There a model of stragglers sets how many may miss; here it is a number.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace zeroth {

/// A worker becomes slow with a probability in each step, and stays so with another one. A slow worker's answer comes
/// later by a Pareto-distributed time: scale u^(-1/shape) with u uniform in (0, 1]. Shapes of 1 to 2 have heavy tails:
/// no variance.
struct StragglerModel {
  double becomes_slow = 0.05;
  double recovers = 0.8;
  double scale = 0.5;  ///< in units of the time of one worker for the whole batch, as all times here
  double shape = 1.5;
};

/// Delays [step][worker]. The same seed gives the same, on every machine.
[[nodiscard]] std::vector<std::vector<double>> straggler_delays(const StragglerModel& model, int workers, int steps,
                                                                std::uint64_t seed);

/// The mean time of a step. Throws kUsage for no steps, s outside [0, n), and for steps of different workers.
[[nodiscard]] double plain_step_time(std::span<const std::vector<double>> delays);
[[nodiscard]] double coded_step_time(std::span<const std::vector<double>> delays, int stragglers);

struct SequentialCode {
  int stragglers = 1;    ///< s
  int most_missing = 2;  ///< s to n - 1
  int delay = 1;         ///< 1 or more
};
/// The last `delay` of the given steps only finish what was left. Throws kUsage also for fewer steps than that.
[[nodiscard]] double sequential_step_time(std::span<const std::vector<double>> delays, const SequentialCode& code);

}  // namespace zeroth
