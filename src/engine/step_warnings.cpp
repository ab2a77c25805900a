#include "engine/step_warnings.h"

#include <zeroth/base/error.h>
#include <zeroth/base/text.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

namespace zeroth {

void StepWarnings::look_at(const CommitVote& vote, std::int64_t committed, bool timed) {
  if (vote.joined > 0) return;  // who has no batch does less
  if (vote.uneven_rank >= 0 && vote.failed_rank < 0 && !std::exchange(warned_of_uneven_, true) && rank_ == 0) {
    const auto uneven = static_cast<std::size_t>(vote.uneven_rank);
    log_.warn("rank " + std::to_string(uneven) + " ran " + std::to_string(vote.backwards[uneven]) +
              " backwards in step " + std::to_string(committed + 1) + ", rank 0 ran " +
              std::to_string(vote.backwards[0]) +
              ": where a rank leaves out its step(), the next one takes the gradients of two batches from it");
  }
  if (!timed || rank_ != 0) return;  // who is slow is the same for all, and one says it
  if (const std::optional<Straggler> slow = stragglers_.observe(vote.times)) log_.warn(describe(*slow));
}

void StepWarnings::look_at_wide_gradient(int param) {
  if (param < 0 || std::exchange(warned_of_wide_gradient_, true)) return;
  const ParamPlace& place = model_.places[static_cast<std::size_t>(param)];
  log_.warn(
      "the gradient of " + model_.params[static_cast<std::size_t>(param)].name +
      " came wider than its bucket, which takes " + format_bytes(model_.flat(place.flat).accumulation_bytes()) +
      " beyond the plan from now on: it is used several times, or a graph of an earlier step still holds it (keep "
      "loss.item() "
      "instead of loss), or it came in float32. With zeroth.narrow_buckets = false such buckets are part of the plan");
}

void StepWarnings::count(const StepResult& result) {
  nonfinite_in_a_row_ = result.cause == SkipCause::kNonFinite ? nonfinite_in_a_row_ + 1 : 0;
  ZR_CHECK(nonfinite_in_a_row_ < max_nonfinite_steps_, ErrorCode::kNonFinite,
           std::to_string(nonfinite_in_a_row_) + " steps in a row had no finite gradient",
           {.where = "engine.step",
            .which = result.first_offender ? result.first_offender->param : "",
            .got = result.reason,
            .hint = "lower the learning rate, clip gradients, or look at the named parameter's inputs"});
}

}  // namespace zeroth
