// What a step did: the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zeroth {

/// Where the first non-finite gradient of a step came from.
struct FirstOffender {
  std::string param{};  ///< "" if every local gradient was finite and only the sum over ranks was not
  int rank = -1;
  std::int64_t micro_step = 0;
  std::uint64_t count = 0;  ///< non-finite elements of that gradient
};

/// Where one rank's time of a step went: what it computed, by the phase it was in, and how long it waited for
/// other ranks in all of them. Microseconds, from the commit vote of one step to that of the next.
struct StepTimes {
  std::int64_t between_us = 0;   ///< from step() to the forward: batches are loaded there, models evaluated
  std::int64_t forward_us = 0;   ///< and the loss
  std::int64_t backward_us = 0;  ///< and what the program does between it and step()
  std::int64_t step_us = 0;      ///< norm, update, publication
  std::int64_t waited_us = 0;

  [[nodiscard]] std::int64_t computed_us() const { return between_us + forward_us + backward_us + step_us; }
  bool operator==(const StepTimes&) const = default;
};

struct StepResult {
  bool boundary = false;          ///< false: a micro-step that is not the last one; nothing below is set
  bool committed = false;         ///< parameters were updated
  std::string reason{};           ///< why not, if not
  std::int64_t step = 0;          ///< committed steps so far
  std::int64_t batches = 0;       ///< micro-batches of all ranks that its gradient is the mean of; fewer than ranks x
                                  ///< micro-steps where ranks had run out
  double grad_norm = 0.0;         ///< L2 norm of the averaged, unclipped gradient; exact, see kernels/norm
  double clip_coefficient = 1.0;  ///< what clipping multiplied the gradient with
  double lr = 0.0;                ///< of the first parameter group
  bool preempted =
      false;  ///< a rank was asked to make room (SIGTERM, see zeroth.preemption): save, and end with kExitPreempted
  std::optional<FirstOffender> first_offender{};
  std::vector<StepTimes> times{};  ///< of every rank; zeros in the first step
};

}  // namespace zeroth
