// What a commit vote means: the step's result, the same on every rank.
#pragma once

#include "engine/commit_vote.h"

#include <zeroth/engine/engine.h>
#include <zeroth/engine/step_result.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace zeroth {

struct StepTerms {
  const EngineSettings& settings;
  int data_ranks = 1;                 ///< ranks with batches of their own
  int micro_steps = 1;                ///< that the step has
  std::string offender{};             ///< name of the parameter of CommitVote::offender
  std::int64_t committed = 0;         ///< steps before this one
  std::size_t reported_group = 0;     ///< whose learning rate is reported
  double loss_scale = 1.0;            ///< of the sums
  double norm_factor = 1.0;           ///< of the norm in the vote
  std::optional<double> clip_norm{};  ///< by which to clip; unset: the step's own
};

/// Of a vote that was not refused. Not committed yet: it has a reason why it will not be, or none.
[[nodiscard]] StepResult outcome_of(const CommitVote& vote, const StepTerms& terms);

/// "65536".
[[nodiscard]] std::string scale_text(double scale);

/// Throws kNonFinite for a step that overflowed where the scale cannot fall.
[[noreturn]] void throw_at_smallest_scale(const StepResult& result);

/// What makes a sum over `batches` their mean.
[[nodiscard]] double mean_factor(std::int64_t batches);

}  // namespace zeroth
