#include "engine/step_outcome.h"

#include "engine/early_update.h"

#include <zeroth/base/error.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

namespace zeroth {
namespace {

SkipCause cause_of(const CommitVote& vote, const EngineSettings& settings) {
  if (vote.failed_rank >= 0) return SkipCause::kFailedBackward;
  if (vote.finite()) return SkipCause::kNone;
  return settings.loss_scaling.is_dynamic() ? SkipCause::kOverflow : SkipCause::kNonFinite;
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

std::string scale_text(double scale) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.10g", scale);
  return text.data();
}

void throw_at_smallest_scale(const StepResult& result) {
  throw Error(ErrorCode::kNonFinite, "gradients overflow at the smallest loss scale",
              {.where = "engine.step",
               .which = result.first_offender ? result.first_offender->param : "",
               .expected = "finite gradients at a loss scale of " + scale_text(result.loss_scale),
               .got = result.reason,
               .hint = "look at the named parameter's inputs, lower the learning rate, or train in bf16, which has "
                       "float32's range (bf16.enabled)"});
}

double mean_factor(std::int64_t batches) {
  return 1.0 / static_cast<double>(batches);
}

StepResult outcome_of(const CommitVote& vote, const StepTerms& terms) {
  const std::int64_t batches = std::int64_t{terms.data_ranks} * terms.micro_steps - vote.joined;
  StepResult result{.boundary = true, .step = terms.committed, .batches = batches};
  result.loss_scale = terms.loss_scale;
  result.preempted = vote.preempted_rank >= 0;
  result.times = vote.times;
  result.grad_norm = vote.norm.l2_norm() * terms.norm_factor * mean_factor(batches) / terms.loss_scale;
  result.lr = terms.settings.groups[terms.reported_group].lr * terms.settings.schedule.factor(terms.committed);
  if (vote.offender_rank >= 0) {
    result.first_offender =
        FirstOffender{terms.offender, vote.offender_rank, vote.offender.micro_step, vote.offender.count};
  }
  result.cause = cause_of(vote, terms.settings);
  result.reason = reason_of(vote, result);
  if (result.reason.empty()) {
    result.clip_coefficient =
        clip_coefficient(terms.settings.gradient_clipping, terms.clip_norm.value_or(result.grad_norm));
  }
  return result;
}

}  // namespace zeroth
