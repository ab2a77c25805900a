// The result of a step: the same on every rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth {

/// The first non-finite gradient of a step.
struct FirstOffender {
  std::string param{};  ///< "" if every local gradient was finite and only the sum over ranks was not
  int rank = -1;
  std::int64_t micro_step = 0;
  std::uint64_t count = 0;  ///< non-finite elements of that gradient
};

/// The time of one rank in a step: computing time by phase, and the time of waiting for other ranks in all phases.
/// Microseconds, from the vote of one step to the vote of the next.
struct StepTimes {
  std::int64_t between_us = 0;   ///< from step() to the forward: loading of batches, evaluation
  std::int64_t forward_us = 0;   ///< with the loss
  std::int64_t backward_us = 0;  ///< with the program's time between it and step()
  std::int64_t step_us = 0;      ///< norm, update, publication
  std::int64_t waited_us = 0;

  [[nodiscard]] std::int64_t computed_us() const { return between_us + forward_us + backward_us + step_us; }
  bool operator==(const StepTimes&) const = default;
};

/// Why a step was skipped.
enum class SkipCause : std::uint8_t {
  kNone,
  kFailedBackward,  ///< a backward threw on a rank
  kNonFinite,       ///< a gradient, or the sum of them, was not finite: a fault; too many in a row end the training
  kOverflow,        ///< the same where a loss scale looks for the largest that does not overflow: no fault
};

/// "", "failed backward", "non-finite", "overflow".
[[nodiscard]] std::string_view name_of(SkipCause cause) noexcept;

struct StepResult {
  bool boundary = false;   ///< false: a micro-step that is not the last one; nothing below is set
  bool committed = false;  ///< the step counts: parameters were updated, or will be
  bool delayed = false;    ///< committed, and the update of it runs in the next step (UpdateSettings::delayed_after)
  bool messages = false;   ///< committed, and ranks exchanged messages in the place of gradients: the step is lossy
  bool changed = false;    ///< parameters have changed: by the update of this step, or of the step before
  std::string reason{};    ///< the reason if not
  SkipCause cause = SkipCause::kNone;
  std::int64_t step = 0;     ///< committed steps so far
  std::int64_t batches = 0;  ///< micro-batches of all ranks in the mean of the gradient: fewer than ranks x
                             ///< micro-steps if ranks had no batch
  /// With gradient coding: ranks that left micro-steps out. Their gradients are not in the sum, which is the same.
  std::vector<int> left_out{};
  double grad_norm = 0.0;         ///< L2 norm of the averaged, unclipped gradient; exact, see kernels/norm
  double clip_coefficient = 1.0;  ///< factor of clipping
  double lr = 0.0;                ///< of the first group with a trainable parameter
  double loss_scale = 1.0;        ///< that this step's gradients had; not in grad_norm
  bool preempted =
      false;  ///< a rank was asked to make room (SIGTERM, see zeroth.preemption): save, and end with kExitPreempted
  std::optional<FirstOffender> first_offender{};
  std::vector<StepTimes> times{};  ///< one per rank; zeros in the first step
};

}  // namespace zeroth
