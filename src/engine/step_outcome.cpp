#include "engine/step_outcome.h"

#include <algorithm>
#include <string>

namespace zeroth {
namespace {

SkipCause cause_of(const CommitVote& vote, const EngineSettings& settings) {
  if (vote.failed_rank >= 0) return SkipCause::kFailedBackward;
  if (vote.finite()) return SkipCause::kNone;
  return settings.scales_loss ? SkipCause::kOverflow : SkipCause::kNonFinite;
}

/// The same in words; "" where the step is not skipped.
std::string reason_of(const CommitVote& vote, const StepResult& result) {
  if (vote.failed_rank >= 0) return "backward failed on rank " + std::to_string(vote.failed_rank);
  if (vote.finite()) return "";
  if (!result.first_offender) return "the sum of gradients over ranks is not finite though each of them is";
  const FirstOffender& first = *result.first_offender;
  return "non-finite gradient: parameter " + first.param + ", rank " + std::to_string(first.rank) + ", micro-step " +
         std::to_string(first.micro_step) + ", " + std::to_string(first.count) + " elements";
}

}  // namespace

std::string_view name_of(SkipCause cause) noexcept {
  switch (cause) {
    case SkipCause::kNone:
      break;
    case SkipCause::kFailedBackward:
      return "failed backward";
    case SkipCause::kNonFinite:
      return "non-finite";
    case SkipCause::kOverflow:
      return "overflow";
  }
  return "";
}

double mean_factor(std::int64_t batches) {
  return 1.0 / static_cast<double>(batches);
}

StepResult outcome_of(const CommitVote& vote, const StepTerms& terms) {
  const std::int64_t batches = std::int64_t{terms.data_ranks} * terms.settings.micro_steps - vote.joined;
  StepResult result{.boundary = true, .step = terms.committed, .batches = batches};
  result.preempted = vote.preempted_rank >= 0;
  result.times = vote.times;
  result.grad_norm = vote.norm.l2_norm() * mean_factor(batches);
  result.lr = terms.settings.groups[terms.reported_group].lr * terms.settings.schedule.factor(terms.committed);
  if (vote.offender_rank >= 0) {
    result.first_offender =
        FirstOffender{terms.offender, vote.offender_rank, vote.offender.micro_step, vote.offender.count};
  }
  result.cause = cause_of(vote, terms.settings);
  result.reason = reason_of(vote, result);
  if (result.reason.empty() && terms.settings.gradient_clipping > 0) {
    result.clip_coefficient = std::min(1.0, terms.settings.gradient_clipping / (result.grad_norm + 1e-6));
  }
  return result;
}

}  // namespace zeroth
