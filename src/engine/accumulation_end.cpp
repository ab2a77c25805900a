// Engine: an accumulation ends before its last micro-step, with an update or without one.
#include "engine/coded_step.h"
#include "engine/commit_vote.h"
#include "engine/early_update.h"
#include "engine/own_operations.h"
#include "engine/transfer_log.h"

#include <zeroth/base/error.h>
#include <zeroth/engine/engine.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace zeroth {

void Engine::discard_gradients() {
  if (!had_backward_ && micro_step_ == 0) return;
  // Every rank counts alike: each step() and each drop is one of all ranks.
  const bool after_step = !had_backward_;
  ZR_CHECK(!after_step || dropped_in_a_row_ == 0, ErrorCode::kUsage,
           "zero_grad() drops every accumulation before its update",
           {.where = "engine.zero_grad",
            .expected = "an update between two accumulations that are dropped after step()",
            .got = std::to_string(micro_step_) + " of " + std::to_string(settings_.micro_steps) +
                   " micro-steps dropped, for the second time in a row",
            .hint = "leave zero_grad() out of the loop: each update starts with empty gradients. end_accumulation() "
                    "updates with fewer micro-steps"});
  const int dropped = micro_step_;
  if (code_) code_->announce(/*complete=*/false);
  const CommitVote vote = together([&] {
    uneven_join_->announce(own_->discard);
    std::vector<int> left_out;
    (void)choose_summed(left_out);
    return cast_vote(/*idle=*/false, /*discards=*/true);
  });
  had_backward_ = false;
  micro_step_ = 0;
  early_->is_torn = early_->is_torn || vote.updated_rank >= 0;
  end_delayed_update();
  forget_gradients();
  require_committed(vote, {});
  if (vote.keeping_rank >= 0) throw_not_all_discard(vote, world());
  if (after_step) ++dropped_in_a_row_;
  if (dropped == 0) return;
  log_.progress("zero_grad() dropped an accumulation after " + std::to_string(dropped) + " of " +
                std::to_string(settings_.micro_steps) + " micro-steps");
}

StepResult Engine::end_accumulation() {
  ZR_CHECK(gathers_.empty(), ErrorCode::kUsage, "end_accumulation() of a pipeline",
           {.where = "engine.end_accumulation", .expected = "step_all(), which ends all micro-steps at once"});
  ZR_CHECK(!code_, ErrorCode::kUsage, "end_accumulation() with a gradient code",
           {.where = "engine.end_accumulation",
            .expected = "step() for each of Engine::chunks(), until a result is a boundary"});
  if (had_backward_) {
    StepResult result = step();
    if (result.boundary) return result;
  }
  report_failed_save();
  require_not_torn("end_accumulation()");
  require_own_weights("end_accumulation()");
  StepResult result = together([&]() -> StepResult {
    sync(own_->end_accumulation);
    const std::int64_t own = micro_step_;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(world()), own);
    communicator_.all_gather(std::span(&own, 1), std::span(counts));
    const auto other = std::ranges::find_if(counts, [&counts](std::int64_t count) { return count != counts.front(); });
    ZR_CHECK(other == counts.end(), ErrorCode::kMismatch, "ranks end an accumulation in different micro-steps",
             {.where = "engine.end_accumulation",
              .who = "rank " + std::to_string(other - counts.begin()) + "/" + std::to_string(world()),
              .expected = std::to_string(counts.front()) + " micro-steps, as on rank 0",
              .got = std::to_string(*other),
              .hint = "all ranks make the same calls of step(); engine.batches() with zeroth.uneven = \"join\" does "
                      "it where they have different numbers of batches"});
    if (micro_step_ == 0) return {.step = committed_steps_, .lr = learning_rates()[reported_group_]};
    enter(Phase::kStep);
    // As the last micro-step, with a backward that brings no gradient: it publishes what is open.
    const int micro_steps = std::exchange(micro_step_, 0);
    for (const auto& group : groups_) {
      group->gradients().set_micro_step(settings_.micro_steps - 1);
      group->end_backward();
    }
    return finish_step(/*idle=*/false, micro_steps);
  });
  if (result.boundary) transfer_log_->end_step(transfer_totals());
  if (result.boundary) ++boundaries_;
  if (result.boundary && activity_) activity_->finish_step(committed_steps_);
  enter(Phase::kBetweenSteps);
  return result;
}

}  // namespace zeroth
